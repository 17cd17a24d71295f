// Pieces of the page: elements, figures in words, sparklines and the bar of one GPU.

const SVG = "http://www.w3.org/2000/svg";

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") element.addEventListener("click", value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const text = (element, value) => {
  if (element.textContent !== value) element.textContent = value;
};

export const gib = (mib) => `${(mib / 1024).toFixed(1)} GiB`;

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 0.0005) return "0 s";
  if (seconds < 10) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export const label = (model) => (model.version ? `${model.model}@${model.version}` : model.model);

// What a model executor is doing, in words.
export function doing(model) {
  if (model.phase !== "up") return model.phase;
  if (model.state !== "working") return model.items ? `${model.state}, holds ${model.items}` : model.state;
  return `working on ${model.batch}, holds ${model.items}`;
}

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// Lines over the last 15 minutes; null is a gap. All share one scale.
export function sparkline(element, ...series) {
  const width = 300, height = 34;
  const most = Math.max(1e-9, ...series.flat().filter((value) => value !== null));
  const point = (value, i, all) => `${((i * width) / (all.length - 1)).toFixed(1)},${(height - 2 - (value / most) * (height - 4)).toFixed(1)}`;
  const paths = series.map((values, which) => {
    let path = "";
    values.forEach((value, i) => {
      if (value !== null) path += `${i && values[i - 1] !== null ? "L" : "M"}${point(value, i, values)}`;
    });
    return svg("path", { d: path, class: which ? "second" : "" });
  });
  const filled = series[0].map((value) => value ?? 0);
  const area = `M0,${height}L${filled.map(point).join("L")}L${width},${height}Z`;
  element.setAttribute("viewBox", `0 0 ${width} ${height}`);
  element.setAttribute("preserveAspectRatio", "none");
  element.replaceChildren(svg("path", { d: area, class: "area" }), ...paths);
}

const WIDTH = 1000, GAP = 3;

// What a GPU's memory is made of, from left to right: [class, from, to, title] in MiB.
export function parts(gpu) {
  const found = [];
  let at = 0;
  const add = (kind, mib, title) => {
    if (mib > 0) found.push([kind, at, Math.min(gpu.total_mib, at + mib), title]);
    at += mib;
  };
  add("external", gpu.external_mib, `external: ${gib(gpu.external_mib)}`);
  let tasks = 0;
  for (const model of gpu.models) {
    const mib = Math.max(model.reserved_mib, model.measured_mib ?? 0);
    add("model", mib, `${label(model)}: ${gib(model.reserved_mib)} reserved, ${gib(model.measured_mib ?? 0)} measured; ${doing(model)}`);
    tasks += mib;
  }
  for (const task of gpu.tasks) {
    const measured = task.measured_mib ?? 0;
    const title = `${task.task}: ${gib(task.reserved_mib)} reserved, ${gib(measured)} measured`;
    add("measured", measured, title);
    add("reserved", Math.max(0, task.reserved_mib - measured), title);
    tasks += Math.max(task.reserved_mib, measured);
  }
  add("leftover", gpu.counted_mib - tasks, `leftover of idle executors: ${gib(Math.max(0, gpu.counted_mib - tasks))}`);
  found.push(["headroom", gpu.total_mib - gpu.headroom_mib, gpu.total_mib, `headroom: ${gib(gpu.headroom_mib)}`]);
  return found;
}

// One GPU: a button with its bar, its figures, and where there is room its tasks by name.
export class GpuRow {
  constructor(open, index) {
    this.bar = svg("svg", { viewBox: `0 0 ${WIDTH} 14`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.figures = make("span", { class: "n" });
    this.chips = null;
    this.element = make("button", { class: "gpu", type: "button", on: () => this.gpu && open(this.gpu) }, make("span", {}, String(index)), this.bar, this.figures);
    this.index = index;
    this.gpu = null; // its figures, once they are known
    this.shown = null;
  }

  draw(roomy, now_s) {
    const gpu = this.gpu;
    if (this.shown !== gpu) {
      this.shown = gpu;
      const used = gpu.external_mib + gpu.counted_mib;
      text(this.figures, gpu.state === "up" ? `${(used / 1024).toFixed(1)} / ${gib(gpu.total_mib)}` : gpu.state);
      this.element.classList.toggle("off", gpu.state !== "up");
      this.element.setAttribute("aria-label", `GPU ${gpu.node} ${gpu.index}: ${gib(used)} of ${gib(gpu.total_mib)} taken, ${gpu.busy} of ${gpu.executors} executors busy, ${gpu.state}`);
      this.segments(parts(gpu), gpu.total_mib);
    }
    if (roomy) this.names(now_s);
    else if (this.chips) { this.chips.remove(); this.chips = null; }
  }

  segments(found, total_mib) {
    while (this.bar.childElementCount > found.length) this.bar.lastChild.remove();
    found.forEach(([kind, from, to, title], i) => {
      let rect = this.bar.children[i];
      if (!rect) {
        rect = svg("rect", { y: 0, height: 14 });
        rect.append(svg("title", {}));
        this.bar.append(rect);
      }
      const x = (from / total_mib) * WIDTH;
      const joined = found[i + 1] && found[i + 1][3] === title;
      const width = Math.max(1, ((to - from) / total_mib) * WIDTH - (joined ? 0 : GAP));
      const values = { class: kind, x: x.toFixed(1), width: width.toFixed(1) };
      for (const [name, value] of Object.entries(values)) if (rect.getAttribute(name) !== value) rect.setAttribute(name, value);
      text(rect.firstChild, title);
    });
  }

  names(now_s) {
    const { tasks, models } = this.gpu;
    if (!this.chips) {
      this.chips = make("span", { class: "chips" });
      this.element.append(this.chips);
    }
    const age = (task) => (task.state === "running" ? span(Math.max(0, now_s - task.since_s)) : task.state);
    const names = [...models.map((model) => [label(model), model, doing(model)]), ...tasks.map((task) => [task.task, task, age(task)])];
    while (this.chips.childElementCount > names.length) this.chips.lastChild.remove();
    names.forEach(([name, { reserved_mib, measured_mib }, what], i) => {
      let chip = this.chips.children[i];
      if (!chip) {
        chip = make("span", {}, make("b"), make("span"));
        this.chips.append(chip);
      }
      text(chip.firstChild, name);
      text(chip.lastChild, ` ${gib(Math.max(reserved_mib, measured_mib ?? 0))}, ${what}`);
    });
  }
}
