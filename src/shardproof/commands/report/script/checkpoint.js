// The page of a checkpoint.

const DEEPEST = 32;  // words of a key that are levels of the tree; the rest is one word
const SEEN = 400;  // square units of the map that a part needs to be drawn
const BOXES = 4096;  // boxes of a tensor in a picture

function treeOf(tensors) {
  const root = {name: null, path: "", bytes: 0, tensors: 0, below: new Map()};
  for (const tensor of tensors) {
    const words = tensor.key.split("."), rest = words.splice(DEEPEST - 1);
    if (rest.length) words.push(rest.join("."));
    let part = root;
    for (const word of words) {
      part.bytes += tensor.bytes;
      part.tensors += 1;
      if (!part.below.has(word)) {
        const path = part === root ? word : `${part.path}.${word}`;
        part.below.set(word, {name: word, path, bytes: 0, tensors: 0, below: new Map()});
      }
      part = part.below.get(word);
    }
    part.leaf = tensor;
    part.bytes += tensor.bytes;
    part.tensors += 1;
  }
  return root;
}

// The parts of a part that are large enough to see in an area of the map, and one for all others.
function partsOf(part, area) {
  const parts = [...part.below.values()];
  if (part.leaf && parts.length) {  // the key of a tensor is also the start of other keys
    const {path, leaf} = part;
    parts.push({name: "(itself)", path, bytes: leaf.bytes, tensors: 1, leaf, below: new Map()});
  }
  const sorted = parts.filter(one => one.bytes > 0).sort((a, b) => b.bytes - a.bytes || compare(a.name, b.name));
  const small = sorted.findIndex(one => one.bytes * area < SEEN * part.bytes);
  const rest = small < 0 ? [] : sorted.slice(small || Math.max(1, Math.floor(area / SEEN / 2)));
  if (rest.length < 2) return sorted;
  const name = `${count(rest.length)} other`;
  return [...sorted.slice(0, sorted.length - rest.length), {
    name, path: `${part.path}: ${name}`, bytes: sum(rest, one => one.bytes), tensors: sum(rest, one => one.tensors),
    below: new Map(rest.map(one => [one.name, one])), other: true,
  }];
}

// Joins parts with one part below: "model" with only "layers" below is "model.layers".
function joined(part) {
  const names = part.name === null ? [] : [part.name];
  while (part.below.size === 1 && !part.leaf) {
    [part] = part.below.values();
    names.push(part.name);
  }
  return {...part, name: names.join(".") || "(empty)"};
}

// Squarified treemap: Bruls, Huizing, van Wijk, "Squarified treemaps" (2000).
function squarify(parts, x, y, w, h) {
  const placed = [], whole = sum(parts, part => part.bytes), scale = whole ? w * h / whole : 0;
  for (let at = 0; at < parts.length;) {
    const side = Math.min(w, h), start = at, largest = parts[at].bytes * scale;
    let area = 0, worst = Infinity;
    for (; at < parts.length; at += 1) {
      const size = parts[at].bytes * scale, total = area + size;
      const ratio = Math.max(side * side * largest / total ** 2, total ** 2 / (side * side * size));
      if (at > start && ratio > worst) break;
      area = total;
      worst = ratio;
    }
    const thick = side ? area / side : 0;
    let along = w < h ? x : y;
    for (const part of parts.slice(start, at)) {
      const long = thick ? part.bytes * scale / thick : 0;
      placed.push(w < h ? [part, along, y, long, thick] : [part, x, along, thick, long]);
      along += long;
    }
    if (w < h) [y, h] = [y + thick, h - thick];
    else [x, w] = [x + thick, w - thick];
  }
  return placed;
}

function treemap(tensors, choose) {
  const W = 960, H = 420, root = joined(treeOf(tensors)), path = [root];
  const trail = el("nav", {class: "trail", "aria-label": "part of the tree"}), holder = el("div", {class: "map"});
  const isTensor = part => part.leaf && !part.below.size;
  function fitting(words, width) {
    const room = Math.floor(width / 6.6);
    return room < 3 ? "" : words.length <= room ? words : `${words.slice(0, room - 1)}\u2026`;
  }
  function describe(part) {
    const what = isTensor(part) ? `${part.leaf.dtype} ${list(part.leaf.shape)}` : counted(part.tensors, "tensor");
    return `${part.path}: ${bytes(part.bytes)}, ${share(part.bytes, root.bytes)}, ${what}`;
  }
  function enter(part) {
    if (isTensor(part)) choose(part.leaf);
    else {
      path.push(part);
      draw(true);
    }
  }
  function leave(depth) {
    path.length = depth;
    draw(true);
  }
  function draw(focus) {
    const shapes = [];
    function place(part, x, y, w, h, depth, hue) {
      squarify(partsOf(part, w * h), x, y, w, h).forEach(([one, px, py, pw, ph], at) => {
        const own = joined(one), name = fitting(shown(own.name), pw - 6), number = depth ? hue : at;
        const rect = svg("rect", {x: px, y: py, width: Math.max(0, pw - 1), height: Math.max(0, ph - 1),
          class: `part depth${depth}`, role: "button", tabindex: shapes.length ? -1 : 0});
        meant.set(rect, own);
        shapes.push(hint(paint(rect, colour(one.other ? -1 : number)), describe(own)));
        if (name && ph > 14) shapes.push(text(px + 4, py + 12, name));
        const deeper = !one.other && !isTensor(own) && depth < 2 && pw > 48 && ph > 40;
        if (deeper) place(own, px + 2, py + 17, pw - 5, ph - 20, depth + 1, number);
      });
    }
    place(path[path.length - 1], 0, 0, W, H, 0, 0);
    const made = chart(W, H, "map of the tensors by bytes", shapes);
    made.addEventListener("click", event => { if (meant.has(event.target)) enter(meant.get(event.target)); });
    made.addEventListener("keydown", event => {
      if ((event.key === "Backspace" || event.key === "Escape") && path.length > 1) leave(path.length - 1);
    });
    roving(made, ".part", shape => enter(meant.get(shape)));
    holder.replaceChildren(made);
    trail.replaceChildren(...path.map((part, at) => el("button", {type: "button", onclick: () => leave(at + 1)},
      at ? part.name : part.path || "all", ` ${bytes(part.bytes)}`)));
    if (focus) made.querySelector(".part")?.focus();
  }
  draw(false);
  return [trail, holder, note("Area is bytes. A click or Enter opens a part or shows a tensor; Backspace goes back.")];
}

function writerOf(file) {
  const {rank, file: name} = facts.summary.writers[file];
  const known = rank >= 0;
  return {hue: known ? rank : file, name: known ? `rank ${rank}` : name, label: known ? rank : "", file: name};
}

// The boxes of one tensor, along the first and the last of the dimensions in which it is cut.
function boxesOf(tensor) {
  const layout = facts.layouts[tensor.layout], dims = tensor.shape.length;
  const of = (numbers, at) => numbers.slice(at * dims, (at + 1) * dims);
  const rows = layout.files.map((file, at) =>
    ({writer: writerOf(file), offsets: of(layout.offsets, at), sizes: of(layout.sizes, at)}));
  const range = row => list(row.offsets.map((first, dim) => `${first}:${first + row.sizes[dim]}`));
  const cut = tensor.shape.map((_, dim) => dim).filter(dim => rows.some(row => row.sizes[dim] < tensor.shape[dim]));
  const across = cut.length ? cut[cut.length - 1] : dims - 1, down = cut.length > 1 ? cut[0] : -1;
  const W = 920, H = down < 0 ? 60 : 300, L = 40;
  function extent(row, dim, room) {
    if (dim < 0 || !tensor.shape[dim]) return [0, room];
    return [room * row.offsets[dim] / tensor.shape[dim], room * row.sizes[dim] / tensor.shape[dim]];
  }
  const shapes = rows.slice(0, BOXES).map((row, at) => {
    const [x, w] = extent(row, across, W), [y, h] = extent(row, down, H), label = String(row.writer.label);
    const rect = svg("rect", {x: L + x, y, width: Math.max(0.5, w - 1), height: Math.max(0.5, h - 1), class: "box",
      role: "img", tabindex: at ? -1 : 0});
    hint(paint(rect, colour(row.writer.hue)), `${row.writer.name}: ${range(row)}`);
    return [rect, w > 8 * label.length + 8 && h > 16 && text(L + x + w / 2, y + h / 2 + 4, label, "middle")];
  });
  const axis = dim => `dimension ${dim}: ${count(tensor.shape[dim])}`;
  const side = {transform: `translate(24 ${H / 2}) rotate(-90)`, "text-anchor": "middle"};
  const drawing = chart(L + W, H + 22, "boxes by the rank that wrote them", shapes,
    text(L, H + 16, dims ? axis(across) : "a single number"), down >= 0 && svg("text", side, axis(down)));
  roving(drawing, ".box");
  const isKnown = facts.summary.writers.every(one => one.rank >= 0);
  return [drawing,
    note(cut.length ? `Cut along ${counted(cut.length, "dimension")}. ` : "Not cut: one box. ",
      cut.length > 2 && "The picture has the first and the last of them: boxes lie behind each other. ",
      rows.length > BOXES && `The picture has ${count(BOXES)} of ${count(rows.length)} boxes. `,
      isKnown ? "The colour is the rank that wrote the box; which other ranks had a replica is not stored."
        : "The colour is the file: the format does not record the ranks."),
    table("Boxes", [
      column("box", row => row.offsets.join(), (_, row) => mono(range(row))),
      column("writer", row => row.writer.name),
      column("file", row => row.writer.file, mono),
    ], rows, {size: 20})];
}

const DIGESTS = {
  stored: "stored, not read for this page", verified: "verified for this page",
  damaged: "the bytes do not match", none: "the format has none",
};
const STATES = {stored: "calm", verified: "good", damaged: "bad", none: "calm"};

function describeTensor(tensor) {
  return [
    el("h3", {}, mono(tensor.key)),
    el("p", {}, `${tensor.dtype} ${list(tensor.shape)}, ${bytes(tensor.bytes)}, `,
      `${counted(tensor.chunks, "chunk")} in ${counted(tensor.files, "file")}; digests: ${DIGESTS[tensor.digest]}`,
      tensor.tied && `; tied with ${tensor.tied.join(", ")}`),
    tensor.layout !== null ? boxesOf(tensor)
      : note("The page has no room for its boxes: ", mono("shardproof inspect CKPT KEY"), " lists them."),
  ];
}

function verification() {
  const found = facts.verified;
  if (!found) return note("No tensor was read: ", mono("shardproof page CKPT --verify"), " reads every byte.");
  const [word, kind] = !found.ok ? ["bad", "bad"] : found.unproved ? ["consistent", "calm"] : ["whole", "good"];
  const more = found.faults_in_all - found.faults.length;
  return [
    el("p", {}, badge(word, kind), ` read ${when(found.time)} in ${span(found.seconds)}: `,
      `${bytes(found.bytes)} proved by checksums`, found.unproved > 0 && `, ${bytes(found.unproved)} without a checksum`),
    el("ul", {}, found.faults.map(fault => el("li", {}, badge(fault.type, "bad"), " ", lines(fault.message)))),
    more > 0 && note(`and ${count(more)} more`),
  ];
}

function checkpointPage() {
  const {summary, tensors, dtypes} = facts, ties = Object.keys(summary.aliases).length;
  main.append(figures([
    ["step", summary.step === null ? "none" : count(summary.step)],
    ["saved", summary.time && when(summary.time)],
    ["bytes", bytes(summary.bytes)],
    ["tensors", count(summary.tensors)],
    ["chunks", count(summary.chunks)],
    ["ranks", summary.time && count(summary.world_size)],
    ["format", summary.format],
    ["written by", summary.writer],
    ["tied tensors", ties ? count(ties) : null],
    ["plain values", count(summary.values)],
    ["in files of other steps", summary.referenced_bytes ? bytes(summary.referenced_bytes) : null],
    ["manifest", summary.repaired ? badge("rebuilt by repair", "warn") : null],
  ]));
  if (summary.notes.length) section("Notes", el("ul", {}, summary.notes.map(one => el("li", {}, one))));
  section("Digests", verification());
  const detail = el("div", {class: "detail"});
  const choose = tensor => detail.replaceChildren(...describeTensor(tensor).flat());
  function show(tensor) {
    choose(tensor);
    detail.scrollIntoView({block: "nearest"});
  }
  if (tensors.length) {
    section("Map of the tensors", treemap(tensors, show));
    section("Boxes of a tensor", detail);
    const drawn = one => one.layout === null ? 0 : one.chunks;
    choose([...tensors].sort((a, b) => drawn(b) - drawn(a) || b.bytes - a.bytes)[0]);
    section("Tensors",
      facts.tensors_left_out > 0 && note(`The smallest ${count(facts.tensors_left_out)} are left out.`),
      note("A click, or Enter, shows the boxes of a tensor."),
      table("Stored tensors", [
        column("key", one => one.key, (key, one) => mono([key, ...one.tied || []].join(" = "))),
        number("bytes", one => one.bytes, bytes),
        column("dtype", one => one.dtype),
        column("shape", one => one.shape.join(), (_, one) => list(one.shape)),
        number("chunks", one => one.chunks),
        number("files", one => one.files),
        column("digests", one => one.digest, digest => badge(digest, STATES[digest])),
      ], tensors, {choose: show}));
  }
  const of = part => `${bytes(part)}, ${share(part, summary.bytes)}`, larger = (a, b) => b.bytes - a.bytes;
  const writers = summary.writers.map((one, at) => ({...one, ...writerOf(at)})).sort(larger);
  section("Shares",
    bars("Bytes by dtype", [...dtypes].sort(larger).map((one, at) =>
      [`${one.dtype}, ${counted(one.tensors, "tensor")}`, [[one.bytes, colour(at)]], of(one.bytes)])),
    bars(writers.length > 40 ? "Bytes by writer: the 40 largest" : "Bytes by writer", writers.slice(0, 40).map(one =>
      [one.referenced ? `${one.name}, ${one.file.split("/")[0]}` : one.name,
        [[one.bytes, colour(one.hue)]], of(one.bytes),
        `${one.file}: ${bytes(one.bytes)}, ${counted(one.tensors, "tensor")}, ${counted(one.chunks, "chunk")}`])),
    note("Each element is stored once, whatever ranks had replicas of it."));
  for (const [title, record, all] of [["Metadata", facts.metadata], ["Plain values", facts.values, summary.values],
    ["Values that cannot be read", summary.unreadable]]) {
    const rows = Object.entries(record), left = (all || 0) - rows.length;
    if (rows.length) section(title,
      table(title, [key(row => row[0]), column("value", row => row[1])], rows, {size: 25}),
      left > 0 && note(`${count(left)} more are left out.`));
  }
}
