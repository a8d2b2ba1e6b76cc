// Elements without a framework. Text goes in as text, never as markup: what a model writes is shown
// as it is.

export const byId = (id) => document.getElementById(id);

// h("li", {class: "row", onclick}, "text", child, …). `null` children are left out.
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// Sets only what has changed: screen readers and selections are left alone.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Makes the children of `list` those of `items`, in order, keeping the elements of known keys.
export function keyed(list, items, keyOf, make, update) {
  const known = new Map([...list.children].map((child) => [child.dataset.key, child]));
  let place = list.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let element = known.get(key);
    if (element) {
      known.delete(key);
    } else {
      element = make(item);
      element.dataset.key = key;
    }
    update(element, item);
    if (element === place) place = place.nextElementSibling;
    else list.insertBefore(element, place);
  }
  for (const element of known.values()) element.remove();
}

// For those who do not see: said once, politely.
export function announce(text) {
  const region = byId("announce");
  region.textContent = "";
  requestAnimationFrame(() => { region.textContent = text; });
}
