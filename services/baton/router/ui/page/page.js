"use strict";

// Asks the router for its figures, one question at a time, and draws them. No library, and no markup from data.

const TIMEOUT_MS = 5000;
const MIN_SECONDS = 60; // that a chart is wide
const element = (id) => document.getElementById(id);
const style = getComputedStyle(document.documentElement);
let key = sessionStorage.getItem("baton-key");

async function ask() {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const response = await fetch("ui/data", { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  element("key").hidden = response.status !== 401 && response.status !== 403;
  if (!response.ok) throw new Error(`the router answered ${response.status}`);
  return response.json();
}

function show(data) {
  for (const name of ["in_flight", "waiting", "answers", "prompt_tokens", "generated_tokens"]) {
    element(name).textContent = String(data[name]);
  }
  const sum = (name) => data.workers.reduce((total, worker) => total + worker[name], 0);
  const held = sum("blocks_held");
  const blocks = held + sum("blocks_cached") + sum("blocks_free");
  const last = data.points.at(-1);
  element("token_rate").textContent = last ? last.token_rate.toFixed(1) : "–";
  element("open_handoffs").textContent = String(sum("open_handoffs"));
  element("kv_use").textContent = blocks ? `${held} of ${blocks}` : "–";
  element("workers").replaceChildren(...data.workers.map(row));
  draw("rate", data, "token_rate", "prompt_rate");
  draw("ttft", data, "ttft_p50", "ttft_p99");
  draw("itl", data, "itl_p50", "itl_p99");
  draw("load", data, "in_flight", "waiting");
}

function stateOf(worker) {
  return !worker.ready ? "not ready" : worker.draining ? "draining" : worker.ejected ? "ejected" : "ready";
}

function row(worker) {
  const cells = [worker.address, worker.role, worker.model, stateOf(worker), worker.running, worker.waiting];
  cells.push(worker.open_handoffs, worker.blocks_held, worker.blocks_cached, worker.blocks_free);
  const line = document.createElement("tr");
  for (const cell of cells) line.insertCell().textContent = String(cell);
  return line;
}

function draw(id, data, ...names) {
  const canvas = element(id);
  const context = canvas.getContext("2d");
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  context.scale(scale, scale);
  const top = Math.max(1e-9, ...names.flatMap((name) => data.points.map((point) => point[name] ?? 0)));
  const oldest = data.points.length ? -data.points[0].at : 0;
  const seconds = Math.min(Math.max(oldest, MIN_SECONDS), data.every_s * data.most_points);
  const x = (point) => width * (1 + point.at / seconds);
  const y = (value) => height - 4 - (height - 24) * (value / top);
  context.fillStyle = context.strokeStyle = style.color || "gray";
  context.globalAlpha = 0.6;
  context.font = "12px system-ui, sans-serif";
  context.fillText(top < 1e-8 ? "0" : top < 10 ? top.toFixed(1) : top.toFixed(0), 4, 12);
  context.textAlign = "right";
  context.fillText(`${Math.round(seconds)} s`, width - 4, 12);
  context.fillRect(0, height - 3, width, 1);
  context.globalAlpha = 1;
  names.forEach((name, index) => {
    context.strokeStyle = style.getPropertyValue(index ? "--b" : "--a");
    context.lineWidth = 2;
    context.beginPath();
    let drawing = false;
    for (const point of data.points) {
      const value = point[name];
      if (value === null) { drawing = false; continue; }
      if (drawing) context.lineTo(x(point), y(value));
      else context.moveTo(x(point) - 1, y(value)), context.lineTo(x(point), y(value));
      drawing = true;
    }
    context.stroke();
  });
}

async function run() {
  let pause = 2000;
  try {
    const data = await ask();
    show(data);
    pause = 1000 * data.every_s;
    element("state").className = "";
    element("state").textContent = `live, ${data.workers.filter((worker) => stateOf(worker) === "ready").length} workers ready`;
  } catch (error) {
    element("state").className = "bad";
    element("state").textContent = String(error.message || error);
  }
  setTimeout(run, document.hidden ? 5 * pause : pause);
}

element("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = element("key-field").value.trim();
  sessionStorage.setItem("baton-key", key);
  element("key-field").value = "";
});

run();
