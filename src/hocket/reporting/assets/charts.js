// Charts: stacked bars and curves as SVG, drawn to the width there is.

// rows: [{label, segments: [{name, value, colour}], outline: bool, lines: [tooltip lines]}]
function stackedBars(rows, { most, unit, limit = null, limitWord = "" }) {
  const host = element("div", { class: "bars" });
  return responsive(host, (width) => {
    const narrow = width < 480;
    const named = (row) => (narrow && row.short) || row.label;
    const label = Math.min(narrow ? 96 : 190, 12 + 7.2 * Math.max(...rows.map((row) => named(row).length)));
    const value = 70;
    const high = rows.length > 16 ? 12 : 20;
    const gap = rows.length > 16 ? 4 : 9;
    const room = Math.max(60, width - label - value);
    const scale = room / Math.max(most, limit || 0, 1e-12);
    const top = limit ? 20 : 2;
    const apart = rows.map((row, index) => rows.slice(0, index).filter((one) => one.apart).length * gap);
    const height = top + rows.length * (high + gap) + (apart.at(-1) || 0) + 2;
    const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
    rows.forEach((row, index) => {
      const y = top + index * (high + gap) + apart[index];
      const words = shape("text", { x: 0, y: y + high / 2 + 4 }, clipped(named(row), label - 8));
      svg.append(words);
      let x = label;
      let total = 0;
      for (const part of row.segments) {
        const wide = part.value * scale;
        total += part.value;
        if (wide <= 0) continue;
        const bar = shape("rect", {
          x: x.toFixed(2), y, width: Math.max(0.5, wide).toFixed(2), height: high, colour: part.colour,
          "fill-opacity": row.outline ? 0.35 : 1,
        });
        if (row.outline) {
          bar.style.stroke = `var(--${part.colour})`;
          bar.setAttribute("stroke-width", 1.5);
        }
        svg.append(telling(bar, [`${part.name}: ${unit(part.value)}`, row.title || row.label]));
        x += wide;
      }
      svg.append(shape("text", { x: x + 6, y: y + high / 2 + 4, class: "soft" }, unit(total)));
    });
    if (limit) {
      const x = label + limit * scale;
      svg.append(shape("line", { x1: x, x2: x, y1: top - 4, y2: height, ink: "warn", "stroke-width": 2, "stroke-dasharray": "4 3" }));
      svg.append(shape("text", { x: x - 4, y: 11, "text-anchor": "end", class: "soft" }, `${limitWord} ${unit(limit)}`));
    }
    return svg;
  });
}

// About as many letters as fit; the whole stands in the tooltip.
function clipped(text, width) {
  const letters = Math.max(3, Math.floor(width / 6.6));
  return text.length <= letters ? text : `${text.slice(0, letters - 1)}…`;
}

// series: [{name, colour, points: [[x, y]], dots: bool}]; a rule: {value, word} or null
function curves(title, what, series, unit, { zero = false } = {}) {
  const drawn = series.filter((one) => one.points.length);
  const host = element("div", {});
  const words = drawn.length > 1 ? legend(drawn.map((one) => [one.colour, one.name])) : null;
  const figure = element("div", {}, element("h3", {}, title), element("p", { class: "small" }, what), words, host);
  responsive(host, (width) => {
    const height = 190, left = 52, right = 10, top = 10, bottom = 26;
    const xs = drawn.flatMap((one) => one.points.map((point) => point[0]));
    const ys = drawn.flatMap((one) => one.points.map((point) => point[1]));
    const first = Math.min(...extremes(xs)), last = Math.max(...extremes(xs));
    let low = zero ? 0 : Math.min(...extremes(ys)), high = Math.max(...extremes(ys));
    if (high === low) { high += Math.abs(high) * 0.1 || 1; low -= zero ? 0 : Math.abs(low) * 0.1 || 1; }
    const pad = zero ? 0 : (high - low) * 0.06;
    low -= pad; high += (high - low) * 0.06;
    const px = (x) => left + ((x - first) / (last - first || 1)) * (width - left - right);
    const py = (y) => top + (1 - (y - low) / (high - low)) * (height - top - bottom);
    const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
    const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((n) => power * n >= rough);
    for (let y = Math.ceil(low / step) * step; y <= high; y += step) {
      svg.append(shape("line", { x1: left, x2: width - right, y1: py(y), y2: py(y), class: "grid" }));
      svg.append(shape("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end", class: "soft" }, unit(Math.abs(y) < step / 1e6 ? 0 : y)));
    }
    svg.append(shape("text", { x: left, y: height - 6, class: "soft" }, `step ${whole(first)}`));
    if (last > first) svg.append(shape("text", { x: width - right, y: height - 6, "text-anchor": "end", class: "soft" }, `${whole(last)}`));
    for (const one of drawn) {
      const points = one.points.map(([x, y]) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`).join(" ");
      if (!one.dots && one.points.length > 1) {
        svg.append(shape("polyline", { points, fill: "none", ink: one.colour, "stroke-width": 1.8, "stroke-linejoin": "round" }));
      } else {
        for (const [x, y] of one.points) svg.append(shape("circle", { cx: px(x), cy: py(y), r: 3.5, colour: one.colour }));
      }
    }
    const cross = shape("line", { y1: top, y2: height - bottom, ink: "soft", "stroke-width": 1, visibility: "hidden" });
    const ground = shape("rect", { x: left, y: top, width: Math.max(1, width - left - right), height: height - top - bottom, fill: "transparent" });
    const read = (event) => {
      const box = svg.getBoundingClientRect();
      const wanted = first + ((event.clientX - box.left - left) / (width - left - right)) * (last - first || 1);
      const lines = [];
      let at = null;
      for (const one of drawn) {
        const near = one.points.reduce((best, point) => Math.abs(point[0] - wanted) < Math.abs(best[0] - wanted) ? point : best);
        if (at === null) at = near[0];
        if (!one.dots || Math.abs(near[0] - at) < 1) lines.push(`${drawn.length > 1 ? `${one.name}: ` : ""}${unit(near[1])}`);
      }
      cross.setAttribute("x1", px(at));
      cross.setAttribute("x2", px(at));
      cross.setAttribute("visibility", "visible");
      showTip([`step ${whole(at)}`, ...lines], event.clientX, event.clientY);
    };
    ground.addEventListener("pointermove", read);
    ground.addEventListener("pointerdown", read);
    ground.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hideTip(); });
    svg.append(cross, ground);
    return svg;
  });
  return figure;
}

// Smallest and largest, without spreading thousands of arguments.
function extremes(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

// columns: [{title, number: bool}], rows: [[cell, ...]]; on a narrow page each row becomes a block.
function table(columns, rows, chosen = () => false) {
  return element("div", { class: "scroll" }, element("table", { class: "stack" },
    element("thead", {}, element("tr", {}, columns.map((column) => element("th", { class: column.number ? "number" : "", scope: "col" }, column.title)))),
    element("tbody", {}, rows.map((row, index) => element("tr", { class: chosen(index) ? "chosen" : "" },
      row.map((cell, at) => element("td", {
        class: [columns[at].number ? "number" : "", at === 0 ? "key" : ""].join(" ").trim(),
        "data-label": columns[at].title,
      }, element("span", {}, cell))))))));
}
