// Elements, numbers and colours: what every part of the page draws with.
// Text enters the page through text nodes alone, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "colour") made.style.background = `var(--${value})`;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

function shape(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "colour") made.style.fill = `var(--${value})`;
    else if (name === "ink") made.style.stroke = `var(--${value})`;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat());
  return made;
}

// --- numbers ------------------------------------------------------------------------------

function three(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 999.5) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(3)));
}

function seconds(value) {
  const size = Math.abs(value);
  if (size < 5e-10) return "0 s";
  if (size < 1e-3) return `${three(value * 1e6)} µs`;
  if (size < 1) return `${three(value * 1e3)} ms`;
  if (size < 120) return `${three(value)} s`;
  return `${three(value / 60)} min`;
}

function bytes(value) {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["KB", 1e3]]) {
    if (Math.abs(value) >= size) return `${three(value / size)} ${unit}`;
  }
  return `${three(value)} B`;
}

const share = (value) => `${(value * 100).toFixed(1)}%`;
const whole = (value) => Math.round(value).toLocaleString("en-US");
const UNITS = { seconds, bytes, share, rate: whole, loss: (value) => String(Number(value.toPrecision(4))) };

// By how much `now` is more or less than `then`.
function change(now, then) {
  const by = seconds(Math.abs(now - then));
  return by === "0 s" ? by : `${now > then ? "+" : "−"}${by}`;
}

// How far the prediction was from what was measured, as a person says it.
function difference(unit, measured, predicted) {
  if (unit === "share") {
    const points = (predicted - measured) * 100;
    return `${points >= 0 ? "+" : "−"}${Math.abs(points).toFixed(1)} points`;
  }
  if (!(measured > 0)) return "not comparable";
  const ratio = predicted / measured;
  if (ratio >= 3) return `${three(ratio)} times as much`;
  return `${ratio >= 1 ? "+" : "−"}${Math.abs((ratio - 1) * 100).toFixed(1)}%`;
}

// Round distances for a ruler: about `count` of them up to `most`.
function ticks(most, count) {
  if (!(most > 0)) return [0];
  const rough = most / Math.max(1, count);
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((n) => unit * n >= rough * 0.999);
  const found = [];
  for (let at = 0; at <= most * 1.0001; at += step) found.push(at);
  return found;
}

// --- colours and words --------------------------------------------------------------------

const CATEGORIES = {
  forward: "forward",
  backward: "backward",
  weight: "weight gradient",
  optimizer: "optimizer",
  send: "send",
  receive: "receive",
  collective: "collective",
  idle: "idle",
};

const KINDS = {
  F: ["forward", "Forward"],
  B: ["backward", "Backward"],
  I: ["backward", "Backward of the inputs"],
  OVERLAP_F_B: ["backward", "Forward and backward at once"],
  W: ["weight", "Weight gradient"],
  optimizer: ["optimizer", "Optimizer"],
  SEND_F: ["send", "Send activations"],
  SEND_B: ["send", "Send gradients"],
  send: ["send", "Send"],
  RECV_F: ["receive", "Receive activations"],
  RECV_B: ["receive", "Receive gradients"],
  receive: ["receive", "Receive"],
  REDUCE_GRAD: ["collective", "Sum gradients over the replicas"],
  UNSHARD: ["collective", "Gather parameters"],
  RESHARD: ["collective", "Free gathered parameters"],
};

const kindOf = (kind) => KINDS[kind] || ["collective", kind];

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const dark = matchMedia("(prefers-color-scheme: dark)");

// --- one tooltip for the page ---------------------------------------------------------------

const tip = element("div", { class: "tip", role: "tooltip", hidden: true });

function showTip(lines, x, y) {
  tip.replaceChildren(element("b", {}, lines[0]), ...lines.slice(1).map((line) => element("div", {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, x + 14), innerWidth - box.width - 8);
  const below = y + 18 + box.height < innerHeight;
  tip.style.transform = `translate(${Math.max(8, left)}px, ${below ? y + 18 : Math.max(8, y - box.height - 12)}px)`;
}

function hideTip() {
  tip.hidden = true;
}

// A mark that tells its numbers where the pointer, a finger or the keyboard is on it.
function telling(mark, lines) {
  mark.addEventListener("pointermove", (event) => showTip(lines, event.clientX, event.clientY));
  mark.addEventListener("pointerdown", (event) => showTip(lines, event.clientX, event.clientY));
  mark.addEventListener("pointerleave", hideTip);
  return mark;
}

// Draw into a host now, and again whenever its width changes.
function responsive(host, draw) {
  let width = -1;
  const again = () => {
    const now = Math.floor(host.clientWidth);
    if (now > 0 && now !== width) {
      width = now;
      host.replaceChildren(draw(now));
    }
  };
  new ResizeObserver(again).observe(host);
  return host;
}

function legend(entries) {
  return element("ul", { class: "legend" }, entries.map(([name, word, style]) => element("li", {},
    element("span", style ? { class: `swatch ${style}` } : { class: "swatch", colour: name }), word)));
}
