// The monitor page: what the events say, drawn where it can be seen, at most once a frame.

import { Problem, ask, useToken } from "./stream.js";
import { GpuRow, doing, gib, label, make, span, sparkline, text } from "./draw.js";

const $ = (id) => document.getElementById(id);
const ROOMY = 32; // up to so many GPUs there is room for the names of their tasks
const DRAW_MS = 3; // of each frame at most, for bars
const TERMINAL = ["succeeded", "failed", "cancelled", "expired", "dead"];
const STATES = ["scheduled", "waiting", "placed", "claimed", "running", "finishing", "handed_over", ...TERMINAL];

const gpus = new Map(); // uuid -> GpuRow
const nodes = new Map(); // name -> Tile
const lanes = new Map(); // lane -> what waits in it
let counts = {};
let now_s = 0;
let heard_at = 0;
let roomy = true;

// The events are read beside this thread, which hears of the GPUs that can be seen only.
const events = new Worker("events.js", { type: "module" });

// -- nodes and GPUs -------------------------------------------------------------------------------------------

const stale = new Set(); // rows to draw
let frame = 0;

class Tile {
  constructor(name) {
    this.title = make("span");
    this.element = make("div", { class: "node", "data-node": name }, make("h3", {}, name, this.title));
    this.rows = new Map(); // index -> row
    this.visible = false;
    watcher.observe(this.element);
    tiles.set(this.element, this);
  }

  tell(node) {
    const lost = node.state !== "up";
    const silent = now_s - node.renewed_s > 5;
    text(this.title, lost ? node.state : silent ? `silent for ${span(now_s - node.renewed_s)}` : "");
    this.title.classList.toggle("bad-text", lost || silent);
  }
}

const tiles = new WeakMap();
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) tiles.get(entry.target).visible = entry.isIntersecting;
  events.postMessage({ nodes: [...nodes].filter(([, tile]) => tile.visible).map(([name]) => name) });
}, { rootMargin: "200px" });

function redraw(row) {
  stale.add(row);
  frame ||= requestAnimationFrame(drawFrame);
}

function drawFrame() {
  frame = 0;
  const until = performance.now() + DRAW_MS;
  for (const row of stale) {
    stale.delete(row);
    row.draw(roomy, now_s);
    if (performance.now() > until) break;
  }
  if (stale.size) frame = requestAnimationFrame(drawFrame);
}

function tileOf(name) {
  let tile = nodes.get(name);
  if (!tile) {
    tile = new Tile(name);
    nodes.set(name, tile);
    const after = [...nodes.keys()].filter((other) => other > name).sort()[0];
    $("nodes").insertBefore(tile.element, after ? nodes.get(after).element : null);
  }
  return tile;
}

function addGpu({ uuid, node, index }) {
  const row = new GpuRow(showDevice, index);
  row.tile = tileOf(node);
  const after = [...row.tile.rows.values()].filter((other) => other.index > index).sort((a, b) => a.index - b.index)[0];
  row.tile.element.insertBefore(row.element, after ? after.element : null);
  row.tile.rows.set(uuid, row);
  gpus.set(uuid, row);
}

function takeGpu(gpu) {
  const row = gpus.get(gpu.uuid);
  row.gpu = gpu;
  redraw(row);
}

function dropGpu(uuid) {
  const row = gpus.get(uuid);
  if (!row) return;
  row.element.remove();
  row.tile.rows.delete(uuid);
  stale.delete(row);
  gpus.delete(uuid);
}

function dropNode(name) {
  const tile = nodes.get(name);
  if (!tile) return;
  watcher.unobserve(tile.element);
  for (const uuid of [...tile.rows.keys()]) dropGpu(uuid);
  tile.element.remove();
  nodes.delete(name);
}

// -- events ---------------------------------------------------------------------------------------------------

function hear(event) {
  banner(event.away ? `Redis does not answer (${event.away}). These are the latest figures.` : "");
  if (event.at_s === undefined) return;
  now_s = event.at_s;
  heard_at = performance.now();
  if ($("main").classList.contains("loading")) {
    $("nodes").replaceChildren();
    $("main").classList.remove("loading");
  }
  if (event.full) {
    const here = { nodes: new Set(event.nodes.map((n) => n.name)), lanes: new Set(event.lanes.map((l) => l.lane)) };
    event.nodes_gone = [...nodes.keys()].filter((name) => !here.nodes.has(name));
    event.lanes_gone = [...lanes.keys()].filter((lane) => !here.lanes.has(lane));
  }
  event.gpus_gone.forEach(dropGpu);
  event.nodes_gone.forEach(dropNode);
  event.lanes_gone.forEach((lane) => lanes.delete(lane));
  event.nodes.forEach((node) => tileOf(node.name).tell(node));
  event.places.forEach(addGpu);
  event.gpus.forEach(takeGpu);
  event.lanes.forEach((lane) => lanes.set(lane.lane, lane));

  roomy = gpus.size <= ROOMY;
  $("nodes").classList.toggle("roomy", roomy);
  if (roomy) gpus.forEach((row) => row.gpu && redraw(row)); // ages
  $("gpus-empty").hidden = gpus.size > 0;
  drawLanes();
  drawFigures(event);
  if (JSON.stringify(counts) !== JSON.stringify(event.counts)) {
    if ((counts.dead || 0) !== (event.counts.dead || 0)) loadDead.soon();
    counts = event.counts;
    loadTasks.soon();
  }
}

function drawFigures(event) {
  const count = (...states) => states.reduce((sum, state) => sum + (event.counts[state] || 0), 0);
  text($("running"), count("running", "finishing").toLocaleString());
  text($("running-more"), `${count("placed", "claimed").toLocaleString()} placed, about to start`);
  text($("waiting"), count("waiting").toLocaleString());
  const later = [count("scheduled") && `${count("scheduled")} scheduled`, event.intake_backlog && `${event.intake_backlog} at intake`];
  text($("waiting-more"), later.filter(Boolean).join(", ") || "in overflow");
  const { used_mib: used, total_mib: total } = event.memory;
  text($("memory"), total ? `${Math.round((100 * used) / total)} %` : "–");
  text($("memory-more"), `${gib(used)} of ${gib(total)} on ${gpus.size} GPUs`);

  const history = event.history;
  const minute = history.per_s.slice(-4).reduce((sum, value) => sum + value, 0) / 4;
  text($("rate"), `${minute.toFixed(minute < 10 ? 2 : 0)} tasks/s ended in the last minute`);
  const last = (values) => values.findLast((value) => value !== null);
  const half = last(history.wait_p50_s);
  text($("wait"), half === undefined ? "no task was placed" : `half within ${span(half)}, 95 % within ${span(last(history.wait_p95_s))}`);
  const shape = JSON.stringify(history);
  if (drawFigures.shape !== shape) {
    drawFigures.shape = shape;
    sparkline($("rate-line"), history.per_s);
    sparkline($("wait-line"), history.wait_p50_s, history.wait_p95_s);
  }

  const problems = event.problems;
  $("problems").hidden = !problems.length;
  if (drawFigures.problems !== problems.join()) {
    drawFigures.problems = problems.join();
    $("problems").replaceChildren(...problems.map((problem) => make("li", {}, problem)));
  }
  text($("health"), problems.length ? `${problems.length} problem${problems.length > 1 ? "s" : ""}` : "Healthy");
  $("health").className = problems.length ? "pill warn" : "pill good";
}

function drawLanes() {
  const deepest = [...lanes.values()].sort((a, b) => b.depth - a.depth || a.lane.localeCompare(b.lane)).slice(0, 50);
  $("lanes-empty").hidden = deepest.length > 0;
  $("lanes-table").hidden = !deepest.length;
  rows($("lanes"), deepest, (lane) => lane.lane, (lane) => [
    lane.task,
    ["n", lane.vram_mib ? gib(lane.vram_mib) : "?"],
    ["n", lane.depth.toLocaleString()],
    ["n", span(Math.max(0, now_s - lane.head_since_s))],
    ["reason", lane.reason.message],
  ]);
}

// -- tables ---------------------------------------------------------------------------------------------------

// Brings a table's rows up to date in place, so that focus and selection stay where they are.
function rows(body, values, keyOf, cellsOf) {
  const known = new Map([...body.children].map((row) => [row.dataset.key, row]));
  values.forEach((value, i) => {
    const key = keyOf(value);
    const row = known.get(key) || make("tr", { "data-key": key });
    known.delete(key);
    if (body.children[i] !== row) body.insertBefore(row, body.children[i] || null);
    cellsOf(value).forEach((cell, j) => {
      const [kind, content] = Array.isArray(cell) ? cell : ["", cell];
      const td = row.children[j] || row.appendChild(make("td"));
      if (td.className !== kind) td.className = kind;
      if (typeof content === "string") text(td, content);
      else if (!td.firstElementChild || td.dataset.what !== content.what) {
        td.dataset.what = content.what;
        td.replaceChildren(content.element());
      }
    });
  });
  known.forEach((row) => row.remove());
}

const link = (id) => ({ what: id, element: () => make("button", { class: "plain", type: "button", title: id, on: () => showStory(id) }, id.slice(0, 8)) });

// A loader that runs at most once a second, and again if it was asked for meanwhile.
function atMostOnceASecond(load) {
  let running = false, again = false;
  const run = async () => {
    running = true;
    again = false;
    await load().catch((error) => { if (!(error instanceof TypeError)) toast(error.message); });
    setTimeout(() => { running = false; if (again) run(); }, 1000);
  };
  return { soon: () => { if (running) again = true; else run(); } };
}

let shown = 50;
const loadTasks = atMostOnceASecond(async () => {
  if (document.hidden) return;
  const state = $("state").value, find = $("find").value.trim().toLowerCase();
  let found = [], after = null;
  for (let pages = 0; pages < 6 && found.length < shown; pages++) {
    const query = new URLSearchParams({ limit: find ? 500 : Math.min(500, shown), ...(state && { state }), ...(after && { after }) });
    const page = await ask(`/v1/tasks?${query}`);
    found.push(...page.tasks.filter((task) => !find || `${task.name} ${task.id} ${task.node} ${task.reason?.message}`.toLowerCase().includes(find)));
    after = page.next;
    if (!after) break;
  }
  $("more").hidden = !after || !found.length;
  found = found.slice(0, shown);
  $("tasks-empty").hidden = found.length > 0;
  text($("tasks-empty"), find || state ? "No task is like that." : "brim has not seen a task yet.");
  rows($("tasks"), found, (task) => task.id, (task) => [
    [`state ${task.state}`, task.state],
    task.name,
    ["", link(task.id)],
    ["n", task.vram_mib ? gib(task.vram_mib) : "?"],
    task.node ? `${task.node}${task.devices.map((uuid) => `.${gpus.get(uuid)?.index ?? "?"}`).join("")}` : "",
    ["n", task.placed_s ? span(Math.max(0, task.placed_s - task.admitted_s)) : ""],
    ["n", task.started_s ? span(Math.max(0, (task.finished_s || task.ended_s || now_s) - task.started_s)) : ""],
    ["reason", task.reason?.message || ""],
  ]);
});

const loadDead = atMostOnceASecond(async () => {
  const found = [];
  let after = null;
  for (let pages = 0; pages < 10 && found.length < 50; pages++) {
    const page = await ask(`/v1/tasks?${new URLSearchParams({ state: "dead", limit: 50, ...(after && { after }) })}`);
    found.push(...page.tasks);
    after = page.next;
    if (!after) break;
  }
  $("dead-empty").hidden = found.length > 0;
  $("dead-table").hidden = !found.length;
  rows($("dead"), found, (task) => task.id, (task) => [
    task.name,
    ["", link(task.id)],
    ["reason", task.reason?.message || ""],
    ["", { what: `retry ${task.id}`, element: () => make("button", { type: "button", "aria-label": `Try ${task.name} ${task.id.slice(0, 8)} again`, on: () => retry(task.id) }, "Retry") }],
  ]);
});

async function retry(id) {
  try {
    const answer = await ask(`/v1/tasks/${encodeURIComponent(id)}/retry`, "POST");
    toast(`${id.slice(0, 8)} is ${answer.state} again`);
  } catch (error) {
    toast(error.message);
  }
  loadDead.soon();
}

// -- dialogs --------------------------------------------------------------------------------------------------

const facts = (pairs) => make("dl", {}, ...Object.entries(pairs).filter(([, value]) => value !== null && value !== undefined && value !== "").flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]));
const clock = (ms) => new Date(ms).toLocaleTimeString(undefined, { hour12: false }) + `.${String(Math.floor(ms % 1000)).padStart(3, "0")}`;

function said(event) {
  const { t, event: name, reason, estimate, ...rest } = event;
  const parts = Object.entries(rest).map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`);
  if (reason) parts.unshift(reason.message ?? String(reason));
  if (estimate?.sum) parts.unshift(estimate.sum);
  return parts.join(" · ");
}

let open = null;
async function showStory(id) {
  open = id;
  text($("story-error"), "");
  if (!$("story").open) {
    text($("story-title"), `Task ${id}`);
    $("story-body").replaceChildren(make("p", { class: "small" }, "Loading…"));
    $("story").showModal();
  }
  try {
    const task = await ask(`/v1/tasks/${encodeURIComponent(id)}`);
    if (open !== id) return;
    text($("story-title"), task.name);
    const outcome = task.error ? `${task.error.type}: ${task.error.message}` : task.result !== null ? JSON.stringify(task.result) : task.result_note;
    $("story-body").replaceChildren(
      facts({
        id: task.id,
        state: task.cancelling && !TERMINAL.includes(task.state) ? `${task.state}, being cancelled` : task.state,
        reason: task.reason?.message,
        position: task.position === null ? null : `${task.position} before it in its lane`,
        start: task.expected_start === null ? task.expected_note?.message : `in ${task.expected_start.map(span).join(" to ")}, likely`,
        memory: `${gib(task.vram_mib)} reserved${task.peak_mib === null ? "" : `, ${gib(task.peak_mib)} at its peak`}`,
        priority: task.priority,
        GPU: task.devices.map((uuid) => (gpus.get(uuid) ? `${task.node}.${gpus.get(uuid).index} (${uuid})` : uuid)).join(", "),
        attempts: task.losses ? `${task.attempts}, ${task.losses} lost` : task.attempts,
        result: TERMINAL.includes(task.state) ? outcome : null,
      }),
      make("ol", { class: "events" }, ...task.story.map((event) => make("li", {}, make("time", {}, clock(event.t)), make("b", {}, event.event), make("div", { class: "small" }, said(event))))),
    );
    $("story-cancel").hidden = TERMINAL.includes(task.state) || task.cancelling;
    $("story-retry").hidden = task.state !== "dead";
  } catch (error) {
    if (error instanceof Problem && error.status === 404) $("story-body").replaceChildren();
    text($("story-error"), error.message);
  }
}

async function act(path, method, done) {
  try {
    await ask(path, method);
    toast(done);
    await showStory(open);
  } catch (error) {
    text($("story-error"), error.message);
  }
}

function showDevice(gpu) {
  text($("device-title"), `GPU ${gpu.node}.${gpu.index}`);
  const task = (t) => make("tr", {}, make("td", { class: `state ${t.state}` }, t.state), make("td", {}, t.task), make("td", {}, link(t.task_id).element()), make("td", { class: "n" }, gib(t.reserved_mib)), make("td", { class: "n" }, t.measured_mib === null ? "" : gib(t.measured_mib)), make("td", { class: "n" }, span(Math.max(0, now_s - t.since_s))));
  const model = (m) => make("tr", { title: m.name }, make("td", {}, label(m)), make("td", { class: "doing" }, doing(m)), make("td", { class: "n" }, gib(m.reserved_mib)), make("td", { class: "n" }, m.measured_mib === null ? "" : gib(m.measured_mib)), make("td", { class: "n" }, span(Math.max(0, now_s - m.since_s))));
  $("device-body").replaceChildren(
    facts({
      model: gpu.model, UUID: gpu.uuid, state: gpu.state, capacity: gib(gpu.total_mib), available: gib(gpu.available_mib), reserved: gib(gpu.reserved_mib), measured: gib(gpu.measured_mib),
      external: gib(gpu.external_mib), headroom: gib(gpu.headroom_mib), executors: `${gpu.busy} of ${gpu.executors} busy`,
    }),
    gpu.models.length
      ? make("div", { class: "scroll" }, make("table", { class: "models" }, make("thead", {}, make("tr", {}, ...["model", "is", "reserved", "measured", "for"].map((name, i) => make("th", { scope: "col", class: i > 1 ? "n" : "" }, name)))), make("tbody", {}, ...gpu.models.map(model))))
      : "",
    gpu.tasks.length
      ? make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...["state", "task", "id", "reserved", "measured", "age"].map((name, i) => make("th", { scope: "col", class: i > 2 ? "n" : "" }, name)))), make("tbody", {}, ...gpu.tasks.map(task))))
      : make("p", { class: "empty" }, "No task is on it."),
  );
  $("device").showModal();
}

function banner(message) {
  $("banner").hidden = !message;
  text($("banner"), message);
  $("main").classList.toggle("stale", Boolean(message));
}

let fading = 0;
function toast(message) {
  text($("toast"), message);
  $("toast").hidden = false;
  clearTimeout(fading);
  fading = setTimeout(() => { $("toast").hidden = true; }, 5000);
}

function askForToken() {
  if (sessionStorage.getItem("token")) text($("login-error"), "That token is not known here.");
  if (!$("login").open) $("login").showModal();
}

// The token is kept until the tab is closed.
function passToken() {
  const token = sessionStorage.getItem("token") ?? "";
  useToken(token);
  events.postMessage({ token });
}

// -- settings of the page, and the start ----------------------------------------------------------------------

const THEMES = { "": "Colours: as the system", light: "Colours: light", dark: "Colours: dark" };
function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  $("theme").setAttribute("aria-label", THEMES[name]);
  $("theme").title = THEMES[name];
  localStorage.setItem("theme", name);
}
theme(localStorage.getItem("theme") in THEMES ? localStorage.getItem("theme") : "");
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme(names[(names.indexOf(document.documentElement.dataset.theme || "") + 1) % names.length]);
});

$("state").append(...STATES.map((state) => make("option", { value: state }, state)));
$("state").addEventListener("change", () => { shown = 50; loadTasks.soon(); });
$("find").addEventListener("input", () => { shown = 50; loadTasks.soon(); });
$("filter").addEventListener("submit", (event) => event.preventDefault());
$("more").addEventListener("click", () => { shown += 100; loadTasks.soon(); });
$("story").addEventListener("close", () => { open = null; });
$("login").addEventListener("cancel", (event) => event.preventDefault());
$("login-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", $("token").value.trim());
  $("login").close();
  passToken();
});
$("story-cancel").addEventListener("click", () => act(`/v1/tasks/${encodeURIComponent(open)}`, "DELETE", "Cancelled"));
$("story-retry").addEventListener("click", () => act(`/v1/tasks/${encodeURIComponent(open)}/retry`, "POST", "It is tried again"));
document.addEventListener("visibilitychange", () => { if (!document.hidden) loadTasks.soon(); });
setInterval(() => { if (open && $("story").open && !document.hidden) showStory(open); }, 2000);

let broken = 0;
function linked(on) {
  text($("link"), on ? "live" : "not connected");
  $("link").className = on ? "pill quiet" : "pill bad";
  if (on) {
    if (broken) { loadTasks.soon(); loadDead.soon(); }
    broken = 0;
  } else if (!broken) {
    broken = Date.now();
    const since = heard_at ? ` These are the figures of ${new Date(broken).toLocaleTimeString(undefined, { hour12: false })}.` : "";
    banner(`The monitor does not answer; trying again.${since}`);
  }
}

events.onmessage = ({ data }) => {
  if (data.change) hear(data.change);
  else if (data.gpus) data.gpus.forEach(takeGpu);
  else if (data.locked) askForToken();
  else linked(data.on);
};
passToken();
