// Charts as SVG: lines with bands and marks, stacked areas, or stacked bars, over steps. Pointer and arrow keys show the values.

import { el, show, svg } from "./dom.js";
import { compact } from "./format.js";

const WIDTH = 560, HEIGHT = 220, LEFT = 44, RIGHT = 14, TOP = 10, BOTTOM = 26;

function tickStep(low, high, count = 5) {
  const span = high - low || 1;
  const power = 10 ** Math.floor(Math.log10(span / count));
  return [1, 2, 5, 10].map((factor) => factor * power).find((size) => span / size <= count) ?? 10 * power;
}

function ticks(low, high, count = 5) {
  const step = tickStep(low, high, count);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(Number((n * step).toPrecision(12)) || 0); // no −0
  return found;
}

function range(values, wanted) {
  const known = values.filter((value) => value !== null);
  const low = wanted?.[0] ?? Math.min(...known), high = wanted?.[1] ?? Math.max(...known);
  if (low === high) return [low, low + (Math.abs(low) || 1)];
  const step = tickStep(low, high);
  return [wanted?.[0] ?? Math.floor(low / step) * step, wanted?.[1] ?? Math.ceil(high / step - 1e-9) * step];
}

function stacked(series) {
  const base = series[0].values.map(() => 0);
  return series.map((each) => {
    const lower = [...base];
    each.values.forEach((value, i) => { base[i] += value ?? 0; });
    return { ...each, lower, upper: [...base] };
  });
}

function runs(values) {
  const found = [];
  let current = [];
  values.forEach((value, i) => {
    if (value !== null) current.push(i);
    else if (current.length) { found.push(current); current = []; }
  });
  if (current.length) found.push(current);
  return found;
}

/** The known values, or the edges of their bands. */
export function edges(values, spread = []) {
  return values.flatMap((value, i) => value === null ? [] : [value - (spread[i] ?? 0), value + (spread[i] ?? 0)]);
}

/** A mark's value and the ends of its interval. */
export const interval = ({ value, low, high }) => [value, low ?? value, high ?? value];

/**
 * @param {string} title
 * @param {number[]} steps
 * @param {{label: string, colour: string, values: (number|null)[], spread?: (number|null)[]}[]} series
 * @param {{range?: [number, number], stack?: boolean, bars?: boolean, format?: function, note?: string, pick?: function,
 *   marks?: {label: string, colour: string, first: boolean, value: number, low: number|null, high: number|null}[]}} options
 */
export function chart(title, steps, series, options = {}) {
  const format = options.format ?? compact;
  const piled = options.stack || options.bars;
  const layers = piled ? stacked(series) : series;
  const tops = layers.flatMap((each) => piled ? each.upper : edges(each.values, each.spread));
  const marks = options.marks ?? [];
  const [low, high] = range([...tops, ...marks.flatMap(interval)], options.range ?? (piled ? [0, null] : null));
  const slot = options.bars ? (steps.at(-1) - steps[0]) / (steps.length - 1) || 1 : 0; // the room of a bar, in steps
  const first = steps[0] - slot / 2, last = steps.at(-1) === steps[0] && !slot ? first + 1 : steps.at(-1) + slot / 2;
  const x = (step) => LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / (last - first);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (high - Math.min(high, Math.max(low, value))) / (high - low);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0", "aria-label": spoken(title, steps, series, format) });
  for (const at of ticks(low, high)) {
    drawing.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at) }),
      svg("text", { class: "tick", x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, format(at)));
  }
  for (const at of ticks(first, last, 6).filter(Number.isInteger)) {
    drawing.append(svg("text", { class: "tick", x: x(at), y: HEIGHT - 8, "text-anchor": "middle" }, String(at)));
  }
  const line = (values, indices) => indices.map((i, n) => `${n ? "L" : "M"}${x(steps[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`).join("");
  for (const each of layers) {
    if (options.bars) {
      const width = Math.max(1, 0.8 * (x(first + slot) - x(first)));
      drawing.append(...steps.flatMap((step, i) => each.values[i] ? [svg("rect", { class: `area ${each.colour}`, x: (x(step) - width / 2).toFixed(1), width: width.toFixed(1),
        y: y(each.upper[i]).toFixed(1), height: (y(each.lower[i]) - y(each.upper[i])).toFixed(1) })] : []));
      continue;
    }
    if (options.stack) {
      const all = steps.map((_, i) => i);
      drawing.append(svg("path", { class: `area ${each.colour}`, d: `${line(each.upper, all)}${line(each.lower, [...all].reverse()).replace("M", "L")}Z` }));
      continue;
    }
    for (const part of runs(each.values)) {
      if (each.spread) {
        const upper = each.values.map((value, i) => value + (each.spread[i] ?? 0)), lower = each.values.map((value, i) => value - (each.spread[i] ?? 0));
        drawing.append(svg("path", { class: `band ${each.colour}`, d: `${line(upper, part)}${line(lower, [...part].reverse()).replace("M", "L")}Z` }));
      }
      drawing.append(part.length === 1
        ? svg("circle", { class: `dot ${each.colour}`, cx: x(steps[part[0]]), cy: y(each.values[part[0]]), r: 3 })
        : svg("path", { class: `line ${each.colour}`, d: line(each.values, part) }));
    }
  }
  for (const mark of marks) {
    const at = x(mark.first ? first : last);
    if (mark.low !== null) drawing.append(svg("line", { class: `interval ${mark.colour}`, x1: at, x2: at, y1: y(mark.low), y2: y(mark.high) }));
    drawing.append(svg("circle", { class: `mark ${mark.colour}`, cx: at, cy: y(mark.value), r: 4.5 }, svg("title", {}, `${mark.label}: ${format(mark.value)}`)));
  }
  const hair = svg("line", { class: "hair", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  drawing.append(hair);
  const reading = el("p", { class: "reading" });
  readValues(drawing, hair, reading, { steps, series, x, format, first, last, pick: options.pick });
  const legend = marks.length ? marks.map((mark) => [mark.colour, `${mark.label} ${format(mark.value)}`, "mark"])
    : series.map((each) => [each.colour, each.label, "line"]);
  return el("figure", { class: "chart card" },
    el("figcaption", {}, el("h3", {}, title), options.note ? el("p", { class: "note" }, options.note) : null),
    drawing,
    el("ul", { class: "legend" }, legend.map(([colour, label, kind]) => el("li", {}, el("span", { class: `key ${kind} ${colour}`, "aria-hidden": "true" }), label))),
    reading);
}

function spoken(title, steps, series, format) {
  const parts = series.map((each) => `${each.label} from ${format(each.values[0])} to ${format(each.values.at(-1))}`);
  return `${title}, steps ${steps[0]} to ${steps.at(-1)}: ${parts.join("; ")}`;
}

function readValues(drawing, hair, reading, { steps, series, x, format, first, last, pick }) {
  let at = null;
  const point = (i) => {
    at = i;
    hair.setAttribute("x1", x(steps[i]));
    hair.setAttribute("x2", x(steps[i]));
    hair.setAttribute("visibility", "visible");
    show(reading, el("strong", {}, `step ${steps[i]}`), series.map((each) => `  ${each.label} ${format(each.values[i])}`).join(""));
  };
  const nearest = (event) => {
    const box = drawing.getBoundingClientRect();
    const step = first + (last - first) * ((event.clientX - box.left) * WIDTH / box.width - LEFT) / (WIDTH - LEFT - RIGHT);
    return steps.reduce((best, each, i) => Math.abs(each - step) < Math.abs(steps[best] - step) ? i : best, 0);
  };
  const leave = () => { hair.setAttribute("visibility", "hidden"); show(reading); };
  drawing.addEventListener("pointermove", (event) => point(nearest(event)));
  drawing.addEventListener("pointerleave", leave);
  drawing.addEventListener("blur", leave);
  drawing.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) { event.preventDefault(); point(Math.min(steps.length - 1, Math.max(0, (at ?? -1) + move))); }
    if (event.key === "Enter" && pick && at !== null) pick(steps[at]);
  });
  if (pick) {
    drawing.classList.add("pickable");
    drawing.addEventListener("click", (event) => pick(steps[nearest(event)]));
  }
}
