// Elements from plain values. Text only ever becomes text: no name of a device or a run can become markup, and what
// would reorder or hide other text is written as its number, as in `core/safe_text.py`.

const SVG = "http://www.w3.org/2000/svg";
const UNSAFE = /[\p{Cc}\p{Cf}\p{Co}\p{Cn}\p{Cs}\p{Zl}\p{Zp}\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\uffa0\ufe00-\ufe0f\u{e0100}-\u{e01ef}]/gu;

export function visible(value) {
  if (typeof value !== "string") return value;
  return value.replace(UNSAFE, (character) => (character === "\n" ? character : `\\u{${character.codePointAt(0).toString(16)}}`));
}

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
    else element.setAttribute(name, value === true ? "" : visible(value));
  }
  element.append(...shown(children));
  return element;
}

function shown(children) {
  return children.flat().filter((child) => child !== null && child !== undefined && child !== false).map(visible);
}

export function replace(element, ...children) {
  element.replaceChildren(...shown(children));
  return element;
}

// The same, but only where something has changed; what has the focus keeps it.
export function refresh(element, ...children) {
  const fresh = replace(element.cloneNode(false), ...children);
  if (fresh.isEqualNode(element)) return;
  const held = element.contains(document.activeElement) ? document.activeElement : null;
  const alike = (root) => [...root.querySelectorAll(held.localName)];
  const isSame = (one) => one?.isEqualNode(held);
  const next = held && [alike(fresh)[alike(element).indexOf(held)], ...alike(fresh)].find(isSame);
  element.replaceChildren(...fresh.childNodes);
  next?.focus({ preventScroll: true });
}

export function setText(element, text) {
  const safe = visible(text);
  if (element.textContent !== safe) element.textContent = safe;
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
