// Charts: the values of the last hour of one device as an SVG line. A gap is time without a reading.

const svgNamespace = "http://www.w3.org/2000/svg";

function svg(name, attributes, ...children) {
  const element = document.createElementNS(svgNamespace, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// runs are the parts of values without a gap, as [index of the first, values].
function runs(values) {
  const all = [];
  let run = null;
  values.forEach((value, i) => {
    if (value === null) run = null;
    else if (run) run[1].push(value);
    else all.push(run = [i, [value]]);
  });
  return all;
}

// chart returns a chart of the values, the newest at the right edge. Its width is an hour, also if there are fewer values.
// kind: {name, unit, top}: top is the value at the upper edge; text(value) formats one.
function chart(values, kind, time) {
  const width = 360, height = 40, offset = width - values.length;
  const top = Math.max(kind.top, ...values.filter((v) => v !== null), 1);
  const x = (i) => (offset + i + 0.5).toFixed(1), y = (v) => (height - 1 - (height - 2) * v / top).toFixed(1);
  let line = "", area = "";
  for (const [first, run] of runs(values)) {
    const path = run.map((v, i) => x(first + i) + " " + y(v)).join("L");
    line += "M" + path + (run.length === 1 ? "h0.1" : "");
    area += "M" + x(first) + " " + height + "L" + path + "L" + x(first + run.length - 1) + " " + height + "Z";
  }
  const base = svg("line", {class: "base", x1: 0, x2: width, y1: height, y2: height});
  const cursor = svg("line", {class: "cursor", y1: 0, y2: height, visibility: "hidden"});
  const element = svg("svg", {class: "line", viewBox: "0 0 " + width + " " + height, preserveAspectRatio: "none", role: "img",
    "aria-label": kind.name + " in the last hour: " + summary(values, kind)},
    base, svg("path", {class: "area", d: area}), svg("path", {class: "plot", d: line}), cursor);
  element.readout = {values, kind, time, offset, width, cursor};
  return element;
}

function summary(values, kind) {
  const known = values.filter((v) => v !== null);
  if (!known.length) return "nothing was read";
  const mean = known.reduce((a, b) => a + b, 0) / known.length;
  return "lowest " + kind.text(Math.min(...known)) + ", mean " + kind.text(mean) + ", highest " + kind.text(Math.max(...known));
}

// The value under the pointer is shown in place of the present one.
function followPointer(event) {
  const element = event.target.closest && event.target.closest("svg.line");
  if (!element || !element.readout) return;
  const {values, kind, time, offset, width, cursor} = element.readout, box = element.getBoundingClientRect();
  const at = Math.floor((event.clientX - box.left) / box.width * width), value = values[at - offset];
  const now = element.parentElement.querySelector(".now");
  if (now.dataset.text === undefined) now.dataset.text = now.textContent;
  now.textContent = value === undefined || value === null ? "nothing read" : time(at - offset) + "  " + kind.text(value);
  cursor.setAttribute("x1", at);
  cursor.setAttribute("x2", at);
  cursor.setAttribute("visibility", "visible");
  element.addEventListener("pointerleave", () => {
    now.textContent = now.dataset.text;
    delete now.dataset.text;
    cursor.setAttribute("visibility", "hidden");
  }, {once: true});
}
