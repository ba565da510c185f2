// Elements out of data. Nothing here reads HTML: whatever a job or a person has written is text.

// Sequences that a terminal obeys (CSI, OSC and the short ones), then control characters and marks of direction.
const TERMINAL = /[\u001b\u009b](?:\[[0-?]*[ -\/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[ -\/]*[0-~])?/g;
const UNSHOWN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** Text as it may be shown: without what terminals obey, and with \n for every end of a line. */
export function plain(text) {
  return String(text).replace(TERMINAL, "").replace(/\r\n?/g, "\n").replace(UNSHOWN, "");
}

/**
 * An element. attrs: attributes; `on` is a mapping of events, `class` and `for` as in HTML; false and null leave one
 * out. children: elements, or text; null is left out.
 */
export function h(tag, attrs = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attrs)) {
    if (name === "on") for (const [event, does] of Object.entries(value)) made.addEventListener(event, does);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  put(made, ...children);
  return made;
}

/** Add children to an element. */
export function put(parent, ...children) {
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : document.createTextNode(plain(child)));
  }
  return parent;
}

/** Replace what an element holds. */
export function fill(parent, ...children) {
  parent.replaceChildren();
  return put(parent, ...children);
}

/** Set an element's text, where it is another one: what is read aloud is then read once. */
export function say(element, text) {
  const shown = plain(text);
  if (element.textContent !== shown) element.textContent = shown;
}

/** Say something to who listens to the page, and to nobody else. */
export function announce(text) {
  const place = document.getElementById("said");
  place.textContent = "";
  requestAnimationFrame(() => say(place, text));
}

let made = 0;
/** An id that no other element has. */
export const newId = (what) => `${what}-${++made}`;

/** A table: a caption, the headings of its columns, rows of cells. */
export function table(caption, head, rows, attrs = {}) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", attrs,
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, head.map((one) => h("th", { scope: "col" }, one)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, at) =>
        at === 0 ? h("th", { scope: "row" }, cell) : h("td", {}, cell)))))));
}

/** A dialog that asks: resolves with true where it is confirmed. body: elements; danger: it cannot be undone. */
export function ask(title, body, yes, { danger = false } = {}) {
  return new Promise((resolve) => {
    const head = newId("title");
    const no = h("button", { value: "no", type: "submit", formnovalidate: true }, "Leave it");
    const go = h("button", { value: "yes", type: "submit", class: danger ? "danger" : "main" }, yes);
    // Enter in a field presses the first button, and the first has the focus where there is no field.
    const form = h("form", { method: "dialog" },
      h("h2", { id: head }, title),
      body,
      h("p", { class: "actions" }, danger ? [no, go] : [go, no]));
    const dialog = h("dialog", { "aria-labelledby": head }, form);
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
