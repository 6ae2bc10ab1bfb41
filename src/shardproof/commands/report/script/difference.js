// The page of two checkpoints.

function histogram(found) {
  const W = 300, H = 110, names = ["a", "b", "change"];
  const powers = names.flatMap(name => Object.keys(found[name].magnitudes).map(Number));
  if (!powers.length) return note("All numbers are zero, NaN or infinite.");
  const low = Math.min(...powers), high = Math.max(...powers) + 1;
  const x = power => 6 + (W - 12) * (power - low) / (high - low);
  const tall = most(names, name => Math.max(0, ...Object.values(found[name].magnitudes))) || 1;
  const curves = names.map((name, at) => {
    let d = `M${x(low)} ${H}`;
    for (let power = low; power < high; power += 1) {
      d += `V${H - (H - 8) * (found[name].magnitudes[power] || 0) / tall}H${x(power + 1)}`;
    }
    const curve = svg("path", {d: `${d}V${H}`, class: `curve ${name}`});
    curve.style.stroke = colour(at);
    return curve;
  });
  return chart(W, H + 16, "numbers by magnitude", curves, line(6, H, W - 6, H), text(6, H + 13, `2^${low}`),
    text(W - 6, H + 13, `2^${high}`, "end"));
}

const relative = one => one.relative === null ? "from zero" : short(one.relative);
const several = numbers => numbers.some(Boolean) ? numbers.map(count).join(", ") : "";
function measures(one) {
  const odd = one.one_finite || one.nan.some(Boolean) || one.inf.some(Boolean);
  return `relative ${relative(one)}, largest ${short(one.largest)}` +
    (odd ? `, NaN in A and B ${list(one.nan)}, infinities ${list(one.inf)}` : "");
}

function changes(values) {
  const layers = facts.layers.slice(0, 60), title = "Norm of the change over the norm in A";
  section("Change by layer",
    bars(layers.length < facts.layers.length ? `${title}: the 60 layers that changed most` : title, layers.map(one =>
      [one.layer, [[one.relative || 0, one.one_finite ? "var(--bad)" : "var(--accent)"]], relative(one),
        `${one.layer}: ${counted(one.tensors, "tensor")}, ${measures(one)}`])),
    layers.some(one => one.one_finite) && note("Red: numbers are finite in one of the two alone."));
  const samples = ["in A", "in B", "the change"].map((name, at) => {
    const sample = el("i", {class: "sample"});
    sample.style.background = colour(at);
    return [sample, name];
  });
  section("The tensors that changed most",
    el("div", {class: "grid"}, facts.histograms.map(one => el("figure", {}, histogram(one), el("figcaption", {},
      mono(one.key), ` ${measures(values.find(value => value.key === one.key).measured)}`)))),
    el("p", {class: "legend"}, samples, ". Numbers by magnitude, a bin for each power of two; zeros are left out."));
  section("Tensors that differ",
    note("First the tensors that are finite in one of the two alone, then by the relative difference."),
    table("Tensors that differ", [
      key(),
      number("relative", one => one.measured.relative ?? Infinity, (_, one) => relative(one.measured)),
      number("largest", one => one.measured.largest ?? Infinity, (_, one) => short(one.measured.largest)),
      number("elements", one => one.different / one.total,
        (_, one) => `${count(one.different)} of ${count(one.total)}`),
      number("finite in one", one => one.measured.one_finite, found => found ? count(found) : ""),
      number("NaN in A, B", one => sum(one.measured.nan, Number), (_, one) => several(one.measured.nan)),
      number("Inf in A, B", one => sum(one.measured.inf, Number), (_, one) => several(one.measured.inf)),
    ], values));
}

function differencePage() {
  const found = facts.difference, values = found.values;
  const structure = found.only_a_in_all + found.only_b_in_all + found.changed_in_all;
  const differs = values.length || structure || found.objects_in_all;
  main.append(figures([
    ["state", found.same ? badge("the same", "good") : badge(differs ? "differ" : "not all compared", "warn")],
    ["tensors equal to the bit", count(found.same_tensors)],
    ["tensors that differ", count(values.length)],
    ["keys that differ", count(structure)],
    ["plain values that differ", count(found.objects_in_all)],
    ["finite in one alone", values.length ? count(sum(values, one => one.measured.one_finite)) : null],
    ["read", bytes(found.bytes_read)],
  ]));
  section("The two", table("Checkpoints", [
    column("", side => side === facts.sides[0] ? "A" : "B", value => value, "tight"),
    key(side => side.location, "location"),
    number("step", side => side.step, step => step),
    column("saved", side => side.time, when, "tight"),
    column("format", side => side.format),
    number("tensors", side => side.tensors),
    number("bytes", side => side.bytes, bytes),
    number("ranks", side => side.world_size),
  ], facts.sides), facts.sides.flatMap(side => side.notes).map(one => note(one)));
  if (values.length) changes(values);
  const both = [key(), column("in A", one => one.a), column("in B", one => one.b)];
  for (const [name, title, columns] of [
    ["changed", "Keys of another kind, dtype or shape", both],
    ["objects", "Plain values that differ", both],
    ["only_a", "Keys in A alone", [key(one => one)]],
    ["only_b", "Keys in B alone", [key(one => one)]],
    ["uncompared", "Values that one of the two cannot give", [key(), column("reason", one => one.reason)]],
  ]) {
    const left = found[`${name}_in_all`] - found[name].length;
    if (found[name].length) section(title, table(title, columns, found[name], {size: 25}),
      left > 0 && note(`${count(left)} more: `, mono("shardproof diff A B --json"), " lists all."));
  }
}
