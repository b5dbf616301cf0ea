// What a worker's figures mean to a person: its state, the lane that it stands in, its memory.

/** The state in a word; every state has a class of the same name in page.css. */
export function stateOf(worker) {
  if (worker.refused) return "refused";
  if (!worker.ready) return worker.drained ? "drained" : "lost";
  if (worker.draining) return "draining";
  return worker.ejected ? "ejected" : "ready";
}

/** The role to show: of a worker that is not ready, the one it had last. */
export function roleOf(worker) {
  return worker.ready ? worker.role : worker.last_role;
}

export function blocksOf(worker) {
  return worker.blocks_held + worker.blocks_cached + worker.blocks_free;
}

export function sum(workers, name) {
  return workers.reduce((total, worker) => total + worker[name], 0);
}
