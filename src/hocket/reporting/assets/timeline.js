// The timeline: rank by time on canvas, predicted above measured, one scale for all of them.
//
// All boards of a page share one window [from, to] of the step. What is smaller than a pixel is
// drawn once for that pixel, so that ten thousand events cost no more than the width there is.


// Columns of events by rank and lane, each ordered by start, with the latest end so far.
function lanesOf(timeline) {
  const columns = timeline.events;
  const lanes = Array.from({ length: timeline.ranks * 2 }, () => []);
  for (let i = 0; i < columns.start.length; i++) lanes[columns.rank[i] * 2 + columns.lane[i]].push(i);
  return lanes.map((indices) => {
    const latest = new Float64Array(indices.length);
    let end = -1;
    indices.forEach((i, at) => {
      end = Math.max(end, columns.start[i] + columns.length[i]);
      latest[at] = end;
    });
    return { indices, latest };
  });
}

// The first of a lane whose span, or that of one before it, reaches beyond `from`.
function firstIn(lane, from) {
  let low = 0, high = lane.latest.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.latest[middle] <= from) low = middle + 1; else high = middle;
  }
  return low;
}

function timelineBoard(panels) {
  const longest = Math.max(...panels.map((panel) => panel.timeline.duration)) * 1e6 || 1;
  const view = { from: 0, to: longest };
  const fewest = longest / 5000;
  let only = null; // a category that is picked out in the legend
  let chosen = null; // {panel, index} that the keyboard stands on
  let queued = false;

  const said = element("div", { class: "unseen", "aria-live": "polite" });
  const windowText = element("span", { class: "window" });
  const board = element("div", {
    class: "board", tabindex: 0, role: "application",
    "aria-label": "Timeline of one step. Plus and minus zoom, arrow keys move, zero shows the whole step, n and p go from event to event.",
  });
  for (const panel of panels) {
    panel.lanes = lanesOf(panel.timeline);
    panel.kinds = panel.timeline.kinds.map((kind) => kindOf(kind)[0]);
    panel.canvas = element("canvas", {});
    const parts = [`${seconds(panel.timeline.duration)}`];
    if (panel.timeline.left_out) parts.push(`the ${whole(panel.timeline.left_out)} shortest events are left out`);
    panel.host = element("div", { class: "panel" },
      element("div", { class: "panel-name" },
        panel.colour ? element("span", { class: "dot", colour: panel.colour }) : null,
        element("b", {}, panel.title), element("span", { class: "small" }, parts.join(", "))),
      panel.canvas);
    board.append(panel.host);
  }

  const present = new Set(panels.flatMap((panel) => panel.kinds));
  const buttons = Object.entries(CATEGORIES)
    .filter(([name]) => name === "idle" || present.has(name))
    .map(([name, word]) => element("button", {
      type: "button", "aria-pressed": "false",
      onclick: (event) => {
        only = only === name ? null : name;
        for (const button of buttons) button.setAttribute("aria-pressed", String(button === event.currentTarget && only !== null));
        redraw();
      },
    }, element("span", { class: "swatch", colour: name }), word));

  // --- drawing ----------------------------------------------------------------------------

  const gutter = (width) => (width < 560 ? 30 : 68);
  function heights(ranks) {
    if (ranks <= 8) return [20, 8, 5];
    if (ranks <= 16) return [14, 6, 4];
    if (ranks <= 48) return [8, 4, 2];
    return [5, 2, 1];
  }
  const RULER = 24;

  function redraw() {
    if (queued) return;
    queued = true;
    requestAnimationFrame(() => {
      queued = false;
      const begun = performance.now();
      const palette = Object.fromEntries([...Object.keys(CATEGORIES), "ink", "soft", "line", "raised",
        "on-forward", "on-backward", "on-weight", "on-optimizer"].map((name) => [name, colour(name)]));
      for (const panel of panels) draw(panel, palette);
      windowText.textContent = view.to - view.from >= longest * 0.999
        ? `the whole step, ${seconds(longest / 1e6)}`
        : `${seconds(view.from / 1e6)} to ${seconds(view.to / 1e6)}`;
      board.dataset.drawMilliseconds = (performance.now() - begun).toFixed(2);
      board.dataset.from = view.from.toFixed(1);
      board.dataset.to = view.to.toFixed(1);
    });
  }

  function draw(panel, palette) {
    const { timeline, canvas } = panel;
    const width = Math.floor(canvas.clientWidth);
    if (!width) return;
    const [tall, thin, gap] = heights(timeline.ranks);
    const row = tall + thin + gap;
    const height = RULER + timeline.ranks * row + 8;
    const ratio = Math.min(2, devicePixelRatio || 1);
    if (canvas.width !== width * ratio || canvas.height !== height * ratio) {
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      canvas.style.height = `${height}px`;
    }
    const left = gutter(width), room = width - left - 10;
    panel.place = { left, room, row, tall, thin };
    const scale = room / (view.to - view.from);
    const x = (time) => left + (time - view.from) * scale;
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const end = Math.min(x(timeline.duration * 1e6), left + room);
    // The ruler, and what stands still: a rank that is drawn over is not idle.
    pen.fillStyle = palette.soft;
    const step = ticks(view.to - view.from, Math.max(2, room / (width < 560 ? 76 : 110)));
    const distance = step.length > 1 ? step[1] : view.to - view.from;
    for (let at = Math.ceil(view.from / distance) * distance; at <= view.to; at += distance) {
      const place = x(at);
      pen.fillStyle = palette.line;
      pen.fillRect(Math.round(place), RULER - 6, 1, height - RULER);
      pen.fillStyle = palette.soft;
      const words = at === 0 ? "0" : seconds(at / 1e6);
      if (place + pen.measureText(words).width + 3 < width) pen.fillText(words, place + 3, 9);
    }
    for (let rank = 0; rank < timeline.ranks; rank++) {
      const top = RULER + rank * row;
      if (row >= 12 || rank % Math.ceil(12 / row) === 0) {
        pen.fillStyle = palette.soft;
        pen.fillText(width < 560 ? String(rank) : `rank ${rank}`, width < 560 ? 8 : 14, top + tall / 2 + 1);
      }
      pen.globalAlpha = only === null || only === "idle" ? 1 : 0.35;
      pen.fillStyle = palette.idle;
      const begin = Math.max(left, x(0));
      if (end > begin) pen.fillRect(begin, top, end - begin, tall);
      pen.globalAlpha = 1;
      lane(panel, pen, palette, panel.lanes[rank * 2], top, tall, x, true);
      lane(panel, pen, palette, panel.lanes[rank * 2 + 1], top + tall + 1, thin - 1, x, false);
    }
    // The step's end, so that two lengths compare at a glance.
    if (timeline.duration * 1e6 <= view.to) {
      pen.fillStyle = palette.ink;
      pen.fillRect(Math.round(end) - 1, RULER - 4, 1.5, timeline.ranks * row + 4);
    }
    pen.fillStyle = palette.raised;
    pen.fillRect(width - 10, RULER, 10, height);
  }

  function lane(panel, pen, palette, which, top, high, x, labelled) {
    const columns = panel.timeline.events;
    const { left, room } = panel.place;
    let column = -1, kinds = null; // the pixel that narrow events fall into, and what is drawn there
    for (let at = firstIn(which, view.from); at < which.indices.length; at++) {
      const i = which.indices[at];
      const start = columns.start[i];
      if (start > view.to) break;
      const kind = panel.kinds[columns.kind[i]];
      let begin = Math.max(left, x(start));
      let stop = Math.min(left + room, x(start + columns.length[i]));
      if (stop <= left) continue;
      if (stop - begin < 1) {
        if (Math.floor(begin) !== column) {
          column = Math.floor(begin);
          kinds = new Set();
        }
        if (kinds.has(kind) && !(chosen && chosen.index === i)) continue;
        kinds.add(kind);
        begin = column;
        stop = begin + 1;
      }
      pen.globalAlpha = only === null || only === kind ? 1 : 0.14;
      pen.fillStyle = palette[kind];
      const wide = stop - begin;
      // A hair between neighbours keeps them apart without hiding what is small.
      pen.fillRect(begin, top, wide > 3 ? wide - 1 : wide, high);
      if (chosen && chosen.panel === panel && chosen.index === i) {
        pen.globalAlpha = 1;
        pen.strokeStyle = palette.ink;
        pen.lineWidth = 2;
        pen.strokeRect(begin, top - 1, Math.max(2, wide), high + 2);
      }
      if (labelled && high >= 12 && wide > 18 && columns.microbatch[i] >= 0) {
        const words = `${panel.timeline.kinds[columns.kind[i]]}${columns.microbatch[i]}`;
        if (pen.measureText(words).width + 6 < wide) {
          pen.fillStyle = palette[`on-${kind}`] || palette.ink;
          pen.fillText(words, begin + 4, top + high / 2 + 1);
        }
      }
    }
    pen.globalAlpha = 1;
  }

  // --- the window -------------------------------------------------------------------------

  function show(from, to) {
    let length = Math.min(longest, Math.max(fewest, to - from));
    from = Math.max(0, Math.min(from, longest - length));
    view.from = from;
    view.to = from + length;
    redraw();
  }
  function zoom(factor, around = (view.from + view.to) / 2) {
    const length = Math.min(longest, Math.max(fewest, (view.to - view.from) * factor));
    const part = (around - view.from) / (view.to - view.from);
    show(around - part * length, around + (1 - part) * length);
  }
  const move = (part) => show(view.from + part * (view.to - view.from), view.to + part * (view.to - view.from));
  const wholeStep = () => show(0, longest);

  function timeAt(clientX, canvas) {
    const { left, room } = panels.find((panel) => panel.canvas === canvas).place;
    const inside = clientX - canvas.getBoundingClientRect().left - left;
    return view.from + (Math.max(0, Math.min(room, inside)) / room) * (view.to - view.from);
  }

  // --- what stands where ------------------------------------------------------------------

  function find(clientX, clientY) {
    for (const panel of panels) {
      const box = panel.canvas.getBoundingClientRect();
      if (!panel.place || clientY < box.top || clientY > box.bottom) continue;
      const { row, tall, left, room } = panel.place;
      const below = clientY - box.top - RULER;
      const rank = Math.floor(below / row);
      const inside = clientX - box.left - left;
      if (rank < 0 || rank >= panel.timeline.ranks || inside < 0 || inside > room) return null;
      const perPixel = (view.to - view.from) / room;
      const time = view.from + inside * perPixel;
      const which = panel.lanes[rank * 2 + (below - rank * row > tall ? 1 : 0)];
      const columns = panel.timeline.events;
      let best = null, nearest = 3 * perPixel;
      for (let at = firstIn(which, time - nearest); at < which.indices.length; at++) {
        const i = which.indices[at];
        if (columns.start[i] > time + 3 * perPixel) break;
        const away = Math.max(columns.start[i] - time, time - columns.start[i] - columns.length[i], 0);
        if (away <= nearest) { nearest = away; best = i; }
      }
      return { panel, index: best, rank, time };
    }
    return null;
  }

  // What the same action took in the other timeline of this run.
  function counterpart(panel, i) {
    const other = panels.find((one) => one !== panel && one.run === panel.run);
    if (!other) return null;
    if (!other.byAction) {
      other.byAction = new Map();
      const columns = other.timeline.events;
      columns.start.forEach((_, at) => {
        if (columns.microbatch[at] < 0) return;
        other.byAction.set([columns.rank[at], other.timeline.kinds[columns.kind[at]], columns.stage[at], columns.microbatch[at]].join(), at);
      });
    }
    const columns = panel.timeline.events;
    const at = other.byAction.get([columns.rank[i], panel.timeline.kinds[columns.kind[i]], columns.stage[i], columns.microbatch[i]].join());
    return at === undefined ? null : `${other.which}: ${seconds(other.timeline.events.length[at] / 1e6)}`;
  }

  function describe({ panel, index, rank, time }) {
    if (index === null) return [`Idle or between events`, `rank ${rank}, at ${seconds(time / 1e6)} (${panel.which})`];
    const columns = panel.timeline.events;
    const [, word] = kindOf(panel.timeline.kinds[columns.kind[index]]);
    const of = [];
    if (columns.microbatch[index] >= 0) of.push(`microbatch ${columns.microbatch[index]}`);
    if (columns.stage[index] >= 0) of.push(`stage ${columns.stage[index]}`);
    if (columns.axis[index] >= 0) of.push(`over ${panel.timeline.axes[columns.axis[index]]}`);
    const lines = [`${word}${of.length ? `: ${of.join(", ")}` : ""}`,
      `${panel.which}: ${seconds(columns.length[index] / 1e6)}, from ${seconds(columns.start[index] / 1e6)} on rank ${rank}`];
    const other = counterpart(panel, index);
    if (other) lines.push(other);
    if (columns.bytes[index]) lines.push(`message of ${bytes(columns.bytes[index])}`);
    return lines;
  }

  // --- pointer, wheel, touch ----------------------------------------------------------------

  const fingers = new Map();
  let pinched = null;
  for (const panel of panels) {
    const { canvas } = panel;
    canvas.addEventListener("pointerdown", (event) => {
      fingers.set(event.pointerId, { x: event.clientX, canvas });
      canvas.setPointerCapture(event.pointerId);
      board.classList.add("dragging");
      if (fingers.size === 2) pinched = pinch();
    });
    canvas.addEventListener("pointermove", (event) => {
      const finger = fingers.get(event.pointerId);
      if (!finger) {
        const found = find(event.clientX, event.clientY);
        if (found) showTip(describe(found), event.clientX, event.clientY); else hideTip();
        return;
      }
      const by = event.clientX - finger.x;
      finger.x = event.clientX;
      if (fingers.size === 2 && pinched) {
        const now = pinch();
        if (now.apart > 8 && pinched.apart > 8) zoom(pinched.apart / now.apart, timeAt(now.middle, canvas));
        pinched = now;
      } else if (fingers.size === 1 && by) {
        hideTip();
        const time = (by / panel.place.room) * (view.to - view.from);
        show(view.from - time, view.to - time);
      }
    });
    const lifted = (event) => {
      fingers.delete(event.pointerId);
      pinched = null;
      if (!fingers.size) board.classList.remove("dragging");
    };
    canvas.addEventListener("pointerup", (event) => {
      lifted(event);
      if (event.pointerType === "touch") {
        const found = find(event.clientX, event.clientY);
        if (found && found.index !== null) showTip(describe(found), event.clientX, event.clientY); else hideTip();
      }
    });
    canvas.addEventListener("pointercancel", lifted);
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("dblclick", (event) => zoom(0.5, timeAt(event.clientX, canvas)));
    canvas.addEventListener("wheel", (event) => {
      const focused = document.activeElement === board;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
        event.preventDefault();
        move((event.deltaX || event.deltaY) / 1000);
      } else if (focused || event.ctrlKey || event.metaKey) {
        // A wheel that nobody aimed here scrolls the page.
        event.preventDefault();
        zoom(Math.exp(Math.max(-200, Math.min(200, event.deltaY)) / 300), timeAt(event.clientX, canvas));
      }
    }, { passive: false });
  }
  function pinch() {
    const [one, two] = [...fingers.values()];
    return { apart: Math.abs(one.x - two.x), middle: (one.x + two.x) / 2 };
  }

  // --- keyboard -----------------------------------------------------------------------------

  function step(by) {
    if (!chosen) {
      const panel = panels[panels.length - 1];
      chosen = { panel, index: by > 0 ? 0 : panel.timeline.events.start.length - 1 };
    } else {
      const count = chosen.panel.timeline.events.start.length;
      let next = chosen.index + by;
      if (next < 0 || next >= count) {
        const panel = panels[(panels.indexOf(chosen.panel) + by + panels.length) % panels.length];
        chosen = { panel, index: by > 0 ? 0 : panel.timeline.events.start.length - 1 };
      } else chosen = { panel: chosen.panel, index: next };
    }
    const { panel, index } = chosen;
    const columns = panel.timeline.events;
    if (!columns.start.length) return;
    const middle = columns.start[index] + columns.length[index] / 2;
    if (middle < view.from || middle > view.to) {
      const half = (view.to - view.from) / 2;
      show(middle - half, middle + half);
    }
    redraw();
    const lines = describe({ panel, index, rank: columns.rank[index], time: middle });
    said.textContent = lines.join(". ");
    const box = panel.canvas.getBoundingClientRect();
    const { left, room, row } = panel.place;
    showTip(lines, box.left + left + ((middle - view.from) / (view.to - view.from)) * room, box.top + RULER + columns.rank[index] * row + row);
  }
  board.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const does = {
      "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "_": () => zoom(1 / 0.6),
      ArrowLeft: () => move(-0.15), ArrowRight: () => move(0.15), "0": wholeStep, Home: wholeStep,
      n: () => step(1), p: () => step(-1), Escape: () => { chosen = null; hideTip(); redraw(); },
    }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  });
  board.addEventListener("blur", hideTip);

  const button = (words, name, act) => element("button", { type: "button", "aria-label": name, title: name, onclick: act }, words);
  const toolbar = element("div", { class: "toolbar" },
    button("−", "Zoom out", () => zoom(1 / 0.6)), button("+", "Zoom in", () => zoom(0.6)),
    button("◀", "Earlier", () => move(-0.3)), button("▶", "Later", () => move(0.3)),
    button("Whole step", "Show the whole step", wholeStep), windowText);
  new ResizeObserver(redraw).observe(board);
  dark.addEventListener("change", redraw);
  const help = element("p", { class: "small" },
    "Drag to move, pinch or double-click to zoom. Click the picture once and the wheel zooms; + − 0 and the arrow keys work as well, n and p go from event to event.");
  return element("div", {}, element("div", { class: "legend" }, buttons), toolbar, board, said, help);
}
