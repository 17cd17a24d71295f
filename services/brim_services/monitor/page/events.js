// A worker beside the page: follows the monitor's events, keeps the whole cluster, and tells the page what it shows.
// Reading a megabyte of events a second is no work for the thread that draws.

import { follow, useToken } from "./stream.js";

const gpus = new Map(); // uuid -> GPU, all of them
let shown = new Set(); // names of the nodes that can be seen
let unlock = null;

function hear(event) {
  if (event.at_s === undefined) return postMessage({ change: event });
  const { gpus: changed, gpus_gone: names, ...rest } = event;
  const here = event.full && new Set(changed.map((gpu) => gpu.uuid));
  const gone = here ? [...gpus.keys()].filter((uuid) => !here.has(uuid)) : names;
  const places = changed.filter((gpu) => !gpus.has(gpu.uuid)).map(({ uuid, node, index }) => ({ uuid, node, index }));
  gone.forEach((uuid) => gpus.delete(uuid));
  changed.forEach((gpu) => gpus.set(gpu.uuid, gpu));
  const memory = { used_mib: 0, total_mib: 0 };
  for (const gpu of gpus.values()) {
    memory.used_mib += gpu.external_mib + gpu.counted_mib;
    memory.total_mib += gpu.total_mib;
  }
  postMessage({ change: { ...rest, memory, places, gpus_gone: gone, gpus: changed.filter((gpu) => shown.has(gpu.node)) } });
}

function show(nodes) {
  const fresh = new Set(nodes.filter((name) => !shown.has(name)));
  shown = new Set(nodes);
  postMessage({ gpus: [...gpus.values()].filter((gpu) => fresh.has(gpu.node)) });
}

function locked() {
  postMessage({ locked: true });
  return new Promise((resolve) => { unlock = resolve; });
}

// The page says which token to use, first of all and whenever one was refused; and which nodes can be seen.
onmessage = ({ data }) => {
  if (data.nodes) return show(data.nodes);
  useToken(data.token);
  if (unlock) unlock();
  else follow(hear, (on) => postMessage({ on }), locked);
};
