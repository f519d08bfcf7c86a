// Builds elements from data. Text always becomes a text node, so that no text of a model can become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "hidden") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An HTML element; strings among the children become text. */
export function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** An SVG element. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

/** Replaces the children of a node. */
export function show(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const LONG = 4000;

/** Text of any length and script; a very long one is cut, with a button for the rest. */
export function longText(text, properties = {}) {
  const body = el("span", { dir: "auto", class: "text", ...properties });
  if (text.length <= LONG) {
    body.textContent = text;
    return body;
  }
  const characters = [...text.slice(0, LONG + 1)].slice(0, -1).join("");
  const button = el("button", { class: "quiet", type: "button" }, `Show all ${text.length.toLocaleString("en")} characters`);
  button.addEventListener("click", () => { body.textContent = text; button.remove(); });
  body.textContent = `${characters}…`;
  return el("span", {}, body, " ", button);
}

/** A labelled <select>; options are [value, label] or {label, options}. */
export function select(label, options, value, onchange, properties = {}) {
  const option = ([key, text]) => el("option", { value: key }, text);
  const box = el("select", { onchange: () => onchange(box.value), ...properties },
    options.map((entry) => Array.isArray(entry) ? option(entry)
      : el("optgroup", { label: entry.label }, entry.options.map(option))));
  box.value = value;
  return el("label", { class: "field" }, el("span", {}, label), box);
}

/** A labelled <input>; its callback runs when it loses focus or Enter is pressed. */
export function input(label, value, onchange, properties = {}) {
  const box = el("input", { value: value ?? "", onchange: () => onchange(box.value), ...properties });
  return el("label", { class: "field" }, el("span", {}, label), box);
}
