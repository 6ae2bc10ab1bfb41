// The page of a run.

const KINDS = {
  committed: "good", settled: "calm", referenced: "calm", writing: "calm", suspect: "warn", partial: "warn",
  leftover: "warn", repairable: "bad", damaged: "bad", misplaced: "bad", unreadable: "bad",
};
const SEVERITIES = {error: "bad", warning: "warn", note: "calm"};
const kindOf = step => KINDS[step.status] || "calm";
const timeOf = step => step.time || step.written;

function remarks(step) {
  return [
    step.reason || (step.committed ? "" : step.meaning),
    step.repaired && "repaired",
    step.pinned !== null && `pinned: ${step.pinned}`,
    step.verdict && `settled: ${step.verdict}`,
    step.unnamed > 0 && `${counted(step.unnamed, "file")} of dead saves`,
    step.references.length > 0 && `has chunks in files of ${step.references.join(", ")}`,
    step.linked && "a symbolic link",
  ].filter(Boolean).join("; ");
}
function about(step) {
  return [
    `${step.name}: ${step.status}`,
    step.time ? `saved ${when(step.time)} by ${counted(step.world_size, "rank")}`
      : step.written && `last written ${when(step.written)}`,
    `${bytes(step.bytes)} of state, ${bytes(step.file_bytes)} in its files`,
    step.seconds !== null && `${span(step.seconds)} from the agreement to the commit`,
    step.blocked !== null && `training waited ${span(step.blocked)}`,
    step.second_tier && `second tier: ${step.second_tier}`,
    remarks(step),
  ].filter(Boolean).join("; ");
}

const WIDE = 960, LEFT = 66, RIGHT = 946, TOP = 34, HIGH = 150, LOW = 70, PAUSE = 6;

function timeline(steps) {
  const placed = steps.filter(timeOf).sort((a, b) => timeOf(a) - timeOf(b));
  if (!placed.length) return note("No step has a time.");
  // A pause of the run is drawn as PAUSE times the usual time between two steps, so that the others stay apart.
  const gaps = placed.map((step, at) => at ? timeOf(step) - timeOf(placed[at - 1]) : 0);
  const usual = gaps.filter(gap => gap > 0).sort((a, b) => a - b), limit = PAUSE * usual[usual.length >> 1];
  let whole = 0;
  const places = gaps.map(gap => whole += gap > limit ? limit : gap);
  const xs = places.map(place => whole ? LEFT + 14 + (RIGHT - LEFT - 28) * place / whole : WIDE / 2);
  const timed = placed.some(step => step.seconds !== null || step.blocked !== null);
  const end = TOP + HIGH, low = end + 30, bottom = timed ? low + LOW : end;
  const large = most(steps, step => Math.max(step.bytes, step.file_bytes)) || 1;
  const slow = most(steps, step => Math.max(step.seconds || 0, step.blocked || 0)) || 1;
  const width = Math.max(2, Math.min(16, 0.6 * (RIGHT - LEFT) / placed.length)), room = Math.max(width, 12);
  const axis = (top, base, name, zero) => [line(LEFT, top, RIGHT, top), line(LEFT, base, RIGHT, base),
    text(LEFT - 6, top + 4, name, "end"), text(LEFT - 6, base, zero, "end")];
  let free = 0, minute = "";
  const labels = xs.map((x, at) => {
    if (x < free || (x > RIGHT - 130 && at < xs.length - 1)) return null;
    free = x + 150;
    const [place, anchor] = x < LEFT + 60 ? [LEFT, "start"] : x > RIGHT - 60 ? [RIGHT, "end"] : [x, "middle"];
    const {step, name} = placed[at], time = when(timeOf(placed[at])), before = minute;
    minute = time;
    return [text(place, bottom + 18, step === null ? name : `step ${step}`, anchor),
      time !== before && text(place, bottom + 34, time, anchor)];
  });
  const pauses = gaps.map((gap, at) => gap > limit &&
    text((xs[at - 1] + xs[at]) / 2, end - 6, `\u2026 ${span(gap)} \u2026`, "middle"));
  const shapes = placed.map((step, number) => {
    const at = xs[number], bar = (value, whole, base, high, kind) => {
      const height = Math.max(value ? 2 : 0, high * (value || 0) / whole);
      return svg("rect", {x: at - width / 2, y: base - height, width, height, class: kind});
    };
    return hint(svg("g", {class: `step k-${kindOf(step)}`, tabindex: number ? -1 : 0, role: "img"},
      svg("rect", {x: at - room / 2, y: TOP - 26, width: room, height: bottom - TOP + 26, class: "hit"}),
      bar(step.bytes, large, end, HIGH, "state"),
      bar(step.file_bytes, large, end, HIGH, "files"),
      timed && [bar(step.seconds, slow, bottom, LOW, "seconds"), bar(step.blocked, slow, bottom, LOW, "blocked")],
      step.suspect && svg("path", {d: `M${at} ${TOP - 22}l7 7l-7 7l-7 -7z`, class: "suspect"}),
      step.pinned !== null && svg("circle", {cx: at, cy: TOP - 15, r: 5, class: "pin"}),
      step.name === facts.restore.takes && svg("path", {d: `M${at} ${TOP - 4}l-6 -10h12z`, class: "takes"}),
    ), about(step));
  });
  const made = chart(WIDE, bottom + 42, "time line of the steps", axis(TOP, end, bytes(large), "0 B"),
    timed && axis(low, bottom, span(slow), "0 s"), labels, pauses, shapes);
  roving(made, ".step");
  const sample = kind => el("i", {class: `sample k-${kind}`});
  return [made, el("p", {class: "legend"}, sample("good"), "committed ", sample("warn"),
    "suspect, partial or leftover ", sample("bad"), "cannot be restored; pale: state in files of other steps. ",
    "\u25bc restore takes it, \u25cf pinned, \u25c6 suspect. ",
    timed && "Below: from the agreement of the ranks to the commit; solid: training waited.")];
}

function restoreText() {
  const {takes, passed_over: passed, fault} = facts.restore;
  const step = facts.steps.find(one => one.name === takes);
  const why = fault || "The run has no committed step: a restore starts anew.";
  return [
    takes === null ? el("p", {}, badge("no step", fault ? "bad" : "warn"), " ", lines(why))
      : el("p", {class: "lead"}, badge("restore takes", "good"), " ", mono(takes),
        step && `, saved ${when(step.time)}, ${bytes(step.bytes)}`),
    el("ul", {}, passed.map(item => el("li", {}, badge("passed over", item.damaged ? "bad" : "warn"), " ",
      mono(item.folder), ": ", item.reason, item.tier && ` (the copy on ${item.tier})`))),
    note("The choice of restore() by manifests, indexes and sizes of files. ",
      mono("shardproof doctor RUN --scrub"), " also reads every byte."),
  ];
}

function findings() {
  const found = facts.examination.findings;
  if (!found.length) return el("p", {}, badge("healthy", "good"), " doctor finds nothing wrong.");
  return el("ul", {}, found.map(one => el("li", {}, badge(one.severity, SEVERITIES[one.severity]), " ",
    mono(one.where), " ", lines(one.what), one.fix && el("pre", {}, lines(one.fix)))));
}

function interval() {
  const found = facts.interval;
  if (!found) return note("Nothing is suggested: that needs two committed steps, and the time of a save.");
  const near = found.differs_much ? badge("far from it", "warn") : badge("near it", "good");
  return [
    figures([
      ["between two saves", span(found.interval)],
      ["one save, until its commit", span(found.cost)],
      ["measured", counted(found.saves, "step")],
      ["failure every", found.mtbf && span(found.mtbf)],
      ["suggested", found.suggested && [span(found.suggested), " ", near]],
    ]),
    bars("Suggested time between saves, by the time between two failures of the job", [
      ["as it is", [[found.interval, "var(--ink-2)"]], span(found.interval)],
      ...found.suggestions.map(one =>
        [`failure every ${span(one.mtbf)}`, [[one.suggested, "var(--accent)"]], span(one.suggested)]),
    ]),
    note("Medians of the steps, and the formula of Daly for training that waits for the commit. Training that ",
      "continues during a save can save more often."),
  ];
}

function runPage() {
  const {steps, examination} = facts, last = steps.filter(step => step.committed).pop();
  const [errors, warnings] = ["error", "warning"].map(severity =>
    examination.findings.filter(one => one.severity === severity).length);
  main.append(figures([
    ["state", errors ? badge(counted(errors, "error"), "bad")
      : warnings ? badge(counted(warnings, "warning"), "warn") : badge("healthy", "good")],
    ["restore takes", facts.restore.takes || "no step"],
    ["committed steps", count(examination.steps.length)],
    ["newest", last ? when(last.time) : null],
    ["files of all steps", bytes(sum(steps, step => step.file_bytes))],
    ["free", examination.free === null ? null : bytes(examination.free)],
    ["next full save", examination.next_save ? bytes(examination.next_save) : null],
  ]));
  section("What a restore takes", restoreText());
  section("Faults and their remedies", findings());
  section("Time line", timeline(steps),
    facts.steps_left_out > 0 && note(`${counted(facts.steps_left_out, "older folder")} left out.`));
  const newest = steps.slice(-60);
  const elsewhere = step => step.committed ? Math.max(0, step.bytes - step.file_bytes) : 0;
  section("Space by step", bars(newest.length < steps.length ? "The newest 60 folders" : "Each folder of the run",
    newest.map(step => [step.name, [[step.file_bytes, `var(--${kindOf(step)})`], [elsewhere(step), "var(--line)"]],
      bytes(step.file_bytes), about(step)])),
  note("Solid: the files in the folder. Pale: tensors in files of other steps, which an incremental step refers to."));
  section("Interval", interval());
  const some = get => steps.some(step => get(step) !== null), blocked = step => step.blocked;
  section("Steps", table("Folders of the run", [
    number("step", step => step.step, step => step),
    column("folder", step => step.name, mono, "tight"),
    column("status", step => step.status, (status, step) => badge(status, kindOf(step))),
    column("saved", timeOf, when, "tight"),
    number("state", step => step.bytes, bytes),
    number("files", step => step.file_bytes, bytes),
    number("ranks", step => step.world_size),
    number("to commit", step => step.seconds, span),
    some(blocked) && number("waited", blocked, span),
    some(step => step.second_tier) && column("second tier", step => step.second_tier),
    column("remarks", remarks),
  ].filter(Boolean), steps));
}
