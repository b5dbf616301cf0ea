// Requests to the router. The key is kept for this tab only, and sent in a header, never in an address.

const ROOT = new URL("../", import.meta.url); // of the router, be it behind a path of a proxy
const STORED = "baton-key";
const TIMEOUT_MS = 5000;
let key = sessionStorage.getItem(STORED) ?? "";

/** An answer with a status other than 2xx. ``message`` is the router's own, ``status`` the number. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.name = "ApiError";
    this.status = status;
  }

  /** Whether another key may help. */
  get asksForKey() {
    return this.status === 401 || this.status === 403;
  }
}

/** Use ``given`` from now on; "" forgets the key. */
export function rememberKey(given) {
  key = given.trim();
  if (key) sessionStorage.setItem(STORED, key);
  else sessionStorage.removeItem(STORED);
}

export function hasKey() {
  return key !== "";
}

/** A signal that aborts with ``over``'s, or when the router has not told its figures in time. */
export function inTime(over) {
  return AbortSignal.any([over.signal, AbortSignal.timeout(TIMEOUT_MS)]);
}

/**
 * Send a request to ``path``, which is relative to the router's root ("ui/data", "v1/models"), and return the
 * Response, whose body has not been read. ``options`` are those of fetch; a ``body`` that is a plain object is
 * sent as JSON. Throws ApiError for any status but 2xx, and what fetch throws.
 */
export async function api(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key) headers.set("authorization", `Bearer ${key}`);
  let { body } = options;
  if (body !== null && typeof body === "object" && Object.getPrototypeOf(body) === Object.prototype) {
    headers.set("content-type", "application/json");
    body = JSON.stringify(body);
  }
  const url = new URL(path.replace(/^\/+/, ""), ROOT);
  const response = await fetch(url, { cache: "no-store", ...options, headers, body });
  if (!response.ok) throw new ApiError(response.status, await told(response));
  return response;
}

/** The message of an error, in the form of OpenAI's or Anthropic's API. */
async function told(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `the router answered ${response.status}`;
  }
}
