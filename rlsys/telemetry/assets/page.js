// Shared by the report and the rollouts page. Everything shown reaches the document through textContent only.
const $ = id => document.getElementById(id);
const el = (tag, props, ...children) => {
  const { data, aria, ...plain } = props || {};
  const node = Object.assign(document.createElement(tag), plain);
  for (const [name, value] of Object.entries(aria || {})) node.setAttribute(name === "role" ? name : "aria-" + name, value);
  Object.assign(node.dataset, data);
  node.append(...children);
  return node;
};
const svg = (tag, attributes, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};
const isNumber = v => typeof v === "number" && isFinite(v);
const clamp = v => Math.min(1, Math.max(0, v));
const mean = values => values.reduce((a, b) => a + b, 0) / values.length;
const extent = values => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
const grouped = v => v.toLocaleString("en", { maximumFractionDigits: 0 });

// Four significant digits; big numbers with separators, small ones with an exponent.
function show(v) {
  if (typeof v === "string") return v;
  if (!isNumber(v)) return JSON.stringify(v) ?? "";
  const size = Math.abs(v);
  if (Number.isInteger(v) || size >= 1e4) return size >= 1e4 ? grouped(v) : String(v);
  return size > 0 && size < 1e-3 ? v.toExponential(2) : String(Number(v.toPrecision(4)));
}

// Round values that divide [low, high] into about `count` parts.
function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(k => k * power).find(s => s >= rough);
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return found;
}

// The view is kept in the address, so a link opens the same one.
const fromAddress = defaults => Object.assign(defaults, Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
const toAddress = state => history.replaceState(null, "", "#" + new URLSearchParams(Object.entries(state).filter(([, v]) => v !== "")));

function useTheme(state) {
  const root = document.documentElement;
  const flip = () => {
    const now = root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  };
  $("theme").onclick = flip;
  if (state.theme) { root.dataset.theme = state.theme; delete state.theme; }
  return flip;
}

function useKeys(keys) {
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const inField = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName);
    if (inField && event.key === "Escape") document.activeElement.blur();
    if (inField && document.activeElement.type !== "range" || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
}

function download(name, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
