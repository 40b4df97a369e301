// Elements from plain values. Text only ever becomes text: no name of a device or a run can become markup.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function button(text, onclick, attributes = {}) {
  return h("button", { type: "button", onclick, ...attributes }, text);
}

export function link(path, text, attributes = {}) {
  return h("a", { href: `#/${path.map(encodeURIComponent).join("/")}`, ...attributes }, text);
}

// One call a frame, however often it is asked for.
export function framed(action) {
  let waits = false;
  return () => {
    if (waits) return;
    waits = true;
    // A hidden page draws no frames; it is drawn when it is seen again.
    requestAnimationFrame(() => { waits = false; action(); });
  };
}

export function toast(text, kind = "ok") {
  const note = h("p", { class: `toast ${kind}` }, text);
  document.getElementById("toasts").append(note);
  setTimeout(() => note.remove(), kind === "bad" ? 12000 : 5000);
}
