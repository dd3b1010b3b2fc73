// The mesh: which rank holds what, and which ranks talk over which axis.

const AXIS_COLOURS = { tp: "collective", dp: "backward", pp: "forward", cp: "weight" };
const MOST_CELLS = 16;

function meshPicture(mesh, traffic, machine) {
  const host = element("div", {});
  const { degrees } = mesh;
  const links = Object.fromEntries(traffic.map((row) => [row.axis, row]));
  const split = ["pp", "dp", "tp", "cp"].filter((axis) => degrees[axis] > 1);
  let lit = null; // the axis whose groups are picked out
  let drawing = null;
  const words = { dp: "rows: replicas (dp)", pp: "columns: pipeline stages (pp)", tp: "inside a cell: parts of each layer (tp)", cp: "inside a cell: parts of a sequence (cp)" };
  const entries = split.map((axis) => {
    const row = links[axis];
    const link = mesh.links[axis];
    const detail = (row ? `, ${bytes(row.bytes)} a step` : "") + (link ? ` over ${link}` : "");
    return element("button", {
      type: "button", "aria-pressed": "false",
      onclick: (event) => {
        lit = lit === axis ? null : axis;
        for (const one of entries) one.setAttribute("aria-pressed", String(one === event.currentTarget && lit !== null));
        if (drawing) host.replaceChildren(drawing());
      },
    }, element("span", { class: "swatch", colour: AXIS_COLOURS[axis] }), words[axis] + detail);
  });
  responsive(host, (width) => {
    drawing = () => draw(width);
    return drawing();
  });

  function draw(width) {
    const rows = Math.min(degrees.dp, MOST_CELLS), columns = Math.min(degrees.pp, MOST_CELLS);
    const inner = degrees.tp * degrees.cp;
    const shown = Math.min(inner, MOST_CELLS);
    const pad = 12, head = 26, between = columns > 1 ? Math.min(56, Math.max(14, width / columns / 6)) : 0;
    const side = degrees.dp > 1 ? (width < 480 ? 34 : 78) : 0;
    const cell = Math.min(220, (width - 2 * pad - side - between * (columns - 1) - 2) / columns);
    const across = Math.max(1, Math.min(shown, Math.floor((cell - 12) / 44)));
    const lines = Math.ceil(shown / across);
    const domain = (rank) => (mesh.domain ? Math.floor(rank / mesh.domain) : 0);
    const box = { width: (cell - 12 - 6 * (across - 1)) / across, height: mesh.domain ? 44 : 34 };
    const high = lines * (box.height + 6) + 6;
    const down = rows > 1 ? 22 : 0;
    const top = head + 26;
    const height = top + rows * high + (rows - 1) * down + pad + (degrees.dp > rows || degrees.pp > columns || inner > shown ? 22 : 0) + 6;
    const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Ranks by replica, stage and part" });
    const kinds = [...new Set(Object.values(mesh.links))];
    const where = mesh.domain
      ? `domains of ${mesh.domain} ranks: ${mesh.within} inside, ${mesh.beyond} between`
      : [mesh.machine || "one machine", kinds.join(", ")].filter(Boolean).join(": ");
    const total = side + columns * cell + (columns - 1) * between;
    svg.append(shape("rect", { x: 1, y: 1, width: Math.min(width - 2, total + 2 * pad), height: height - 8, rx: 10, fill: "none", ink: "soft", "stroke-dasharray": "5 4" }));
    svg.append(shape("text", { x: pad, y: 18, class: "soft" }, clipped(where, Math.min(width, total + 2 * pad) - 2 * pad)));
    const at = (r, c, k = 0) => numbers.get([r, c, Math.floor(k / degrees.tp), k % degrees.tp].join());
    const numbers = new Map(mesh.ranks.map((at, rank) => [[at.dp, at.pp, at.cp, at.tp].join(), rank]));
    const faint = (axis) => (lit === null || lit === axis ? 1 : 0.15);
    for (let c = 0; c < columns; c++) {
      const x = pad + side + c * (cell + between);
      const held = (mesh.stages[c] || []).map((stage) => stage + (mesh.layers.length ? ` (${mesh.layers[stage]} layers)` : ""));
      if (degrees.pp > 1) svg.append(shape("text", { x: x + cell / 2, y: head + 14, "text-anchor": "middle", class: "soft" }, clipped(`${cell < 70 ? "" : "stage "}${held.join(", ") || c}`, cell + between - 4)));
      for (let r = 0; r < rows; r++) {
        const y = top + r * (high + down);
        if (c === 0 && degrees.dp > 1) svg.append(shape("text", { x: pad, y: y + high / 2 + 4, class: "soft" }, width < 480 ? `dp${r}` : `replica ${r}`));
        svg.append(shape("rect", { x, y, width: cell, height: high, rx: 7, colour: "idle", "fill-opacity": 0.45 }));
        if (c + 1 < columns) svg.append(line(x + cell, y + high / 2, x + cell + between, y + high / 2, "pp", at(r, c), at(r, c + 1)));
        if (r + 1 < rows) svg.append(line(x + cell / 2, y + high, x + cell / 2, y + high + down, "dp", at(r, c), at(r + 1, c)));
        for (let k = 0; k < shown; k++) {
          const t = k % degrees.tp, cpAt = Math.floor(k / degrees.tp);
          const rank = numbers.get([r, c, cpAt, t].join());
          const bx = x + 6 + (k % across) * (box.width + 6), by = y + 6 + Math.floor(k / across) * (box.height + 6);
          if (k % across && inner > 1) svg.append(line(bx - 6, by + box.height / 2, bx, by + box.height / 2, t > 0 ? "tp" : "cp", at(r, c, k - 1), at(r, c, k)));
          const mark = shape("rect", { x: bx, y: by, width: box.width, height: box.height, rx: 5, colour: "raised", ink: "soft", "stroke-width": 1 });
          const place = split.map((axis) => `${axis} ${{ dp: r, pp: c, tp: t, cp: cpAt }[axis]} of ${degrees[axis]}`).join(", ");
          svg.append(telling(mark, [`${mesh.threads ? "thread" : "rank"} ${rank}`, place || "the whole model", ...(mesh.domain ? [`domain ${domain(rank)}: ${mesh.within} to its ${mesh.domain} ranks, ${mesh.beyond} beyond`] : [])]));
          const name = shape("text", { x: bx + box.width / 2, y: by + box.height / 2 + (mesh.domain ? -3 : 4), "text-anchor": "middle" }, box.width < 52 ? `${rank}` : `${mesh.threads ? "thread" : "rank"} ${rank}`);
          name.style.pointerEvents = "none";
          svg.append(name);
          if (mesh.domain) {
            const home = shape("text", { x: bx + box.width / 2, y: by + box.height - 8, "text-anchor": "middle", class: "soft" }, box.width < 68 ? `d${domain(rank)}` : `domain ${domain(rank)}`);
            home.style.pointerEvents = "none";
            svg.append(home);
          }
        }
      }
    }
    if (degrees.dp > rows || degrees.pp > columns || inner > shown) {
      svg.append(shape("text", { x: pad, y: height - 14, class: "soft" }, `drawn: ${rows} of ${degrees.dp} replicas, ${columns} of ${degrees.pp} pipeline ranks, ${shown} of ${inner} in a cell`));
    }
    return svg;

    // Dashed where it leaves a domain; with a head where it has a direction.
    function line(x1, y1, x2, y2, axis, from, to) {
      const crosses = domain(from) !== domain(to);
      const said = joining(machine, from, to);
      const group = shape("g", { opacity: faint(axis) }, shape("line", { x1, y1, x2, y2, stroke: "transparent", "stroke-width": 14 }), shape("line", { x1, y1, x2, y2, ink: AXIS_COLOURS[axis], "stroke-width": lit === axis ? 4 : 2.5, "stroke-dasharray": crosses ? "4 3" : null }));
      if (axis === "pp" && x2 - x1 > 12) group.append(shape("path", { d: `M${x2 - 7},${y2 - 5} L${x2},${y2} L${x2 - 7},${y2 + 5}`, fill: "none", ink: AXIS_COLOURS[axis], "stroke-width": 2.5 }));
      return said ? telling(group, [`${axis}: ranks ${from} and ${to}`, said]) : group;
    }
  }
  return element("div", {}, entries.length ? element("div", { class: "legend" }, entries) : null, host);
}

// What joins the devices of two ranks, in words; null where that is not known. Ranks on a CPU are
// on no core of their own: they meet in its memory.
function joining(machine, from, to) {
  const count = machine ? machine.names.length + machine.left_out : 0;
  if (!machine || !machine.gpus || !count) return null;
  if (Math.floor(from / count) !== Math.floor(to / count)) return "on two machines: the network";
  const cell = (machine.cells[from % count] || [])[to % count];
  return cell ? linkWords(cell) : null;
}

function linkWords(cell) {
  if (!cell.rate) return cell.path;
  const rate = `${bytes(cell.rate)}/s`;
  return `${cell.path} ${cell.measured ? rate : `(${rate})`}`;
}

// Each two devices of the machine and what joins them.
function linksTable(machine) {
  if (!machine) return missing("The machine's devices and links are not drawn: it was not probed. hocket probe measures them, and later runs are drawn on them.");
  const { names, cells, ranks } = machine;
  const name = (i) => ranks[i].length ? `${names[i]} (rank ${ranks[i].join(", ")})` : names[i];
  const fastest = Math.max(0, ...cells.flat().map((cell) => (cell && cell.rate) || 0));
  const matrix = names.length < 2 ? missing("One device: no links between devices.") : element("div", { class: "scroll" }, element("table", { class: "links" },
    element("thead", {}, element("tr", {}, element("th", {}), names.map((_, i) => element("th", { scope: "col" }, name(i))))),
    element("tbody", {}, cells.map((row, i) => element("tr", {}, element("th", { scope: "row" }, name(i)), row.map((cell) => {
      if (!cell) return element("td", { class: "none" }, "–");
      const width = fastest && cell.rate ? Math.max(4, 100 * cell.rate / fastest) : 0;
      return element("td", {}, linkWords(cell), cell.latency ? element("div", { class: "small" }, `latency ${seconds(cell.latency)}`) : null, bar(width, cell.measured));
    }))))));
  function bar(width, measured) {
    const made = element("div", { class: measured ? "rate" : "rate predicted" });
    made.style.width = `${width}%`;
    return made;
  }
  return element("div", { class: "machine" },
    element("h3", {}, machine.title),
    element("p", { class: "small" }, `${machine.when}; rates in one direction.${machine.gpus ? "" : " Ranks are not pinned to cores; they communicate through the machine's memory."}`),
    matrix,
    machine.left_out ? missing(`${machine.left_out} devices more are not drawn.`) : null,
    element("p", { class: "small" }, [...machine.words.map(([path, words]) => `${path}: ${words}.`), machine.bracketed ? "Rates in brackets were not measured: they are what such links are sold for." : ""].filter(Boolean).join(" ")));
}
