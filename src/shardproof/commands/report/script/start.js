// The heading, the theme, and the page that the facts are of.

const THEMES = ["auto", "light", "dark"];
const nextTheme = () => setTheme(THEMES[(THEMES.indexOf(theme.value) + 1) % 3]);
const theme = el("button", {type: "button", id: "theme", onclick: nextTheme});
function setTheme(name) {
  theme.value = name;
  theme.textContent = `theme: ${name}`;
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
}
setTheme("auto");
const [title, fill] = {
  run: ["Run", runPage], checkpoint: ["Checkpoint", checkpointPage],
  difference: ["Difference of two checkpoints", differencePage],
}[facts.page];
const places = facts.sides ? facts.sides.map(side => side.location) : [facts.location];
document.body.append(
  el("header", {},
    el("div", {}, el("p", {}, title), places.map(place => el("h1", {}, place)),
      note(`made ${when(facts.made)} by ${facts.program}. / searches, Tab and arrows move, Enter opens.`)),
    theme),
  main, tip);
fill();
document.documentElement.dataset.ready = Math.round(performance.now());
