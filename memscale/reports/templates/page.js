/* What moves on the pages: a step's chart says what is live under the pointer; a point of a curve shows its plan. */
"use strict";

const digits = (value) => value.toFixed(value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2);

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  for (; value >= 999.5 && power < units.length - 1; power++) value /= 1024;
  return (power ? digits(value) : value.toFixed(0)) + " " + units[power];
}

function followPointer(step) {
  const data = JSON.parse(step.querySelector("script.timeline").textContent);
  const svg = step.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const values = step.querySelectorAll(".categories b"), moment = step.querySelector(".moment");
  let at = data.peak;
  function show(column) {
    at = Math.max(0, Math.min(data.total.length - 1, column));
    const x = data.left + (at + 0.5) * data.width / data.total.length;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.style.visibility = "visible";
    values.forEach((value, index) => { value.textContent = bytes(data.live[index][at]); });
    const position = (at + 0.5) / data.total.length * data.end;
    const phase = data.phases.filter(([, begin]) => begin <= position).pop();
    moment.textContent = `${phase ? phase[0] + ", " : ""}${data.unit ? digits(position) + " " + data.unit
      : "operator " + Math.round(position)}: ${bytes(data.total[at])} live`;
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * data.span - data.left;
    show(Math.floor(x / data.width * data.total.length));
  });
  svg.addEventListener("keydown", (event) => {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (direction) { show(at + direction * (event.shiftKey ? 20 : 1)); event.preventDefault(); }
  });
}

function showPlans(curve) {
  const plans = [...curve.querySelectorAll("section.plan")], marks = [...curve.querySelectorAll("[data-at]")];
  function show(at) {
    plans.forEach((plan, index) => { plan.hidden = index !== at; });
    marks.forEach((mark) => { mark.classList.toggle("shown", Number(mark.dataset.at) === at); });
  }
  marks.forEach((mark) => {
    const at = Number(mark.dataset.at);
    mark.addEventListener("click", () => show(at));
    mark.addEventListener("focus", () => show(at));
  });
  document.addEventListener("keydown", (event) => {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const next = plans.findIndex((plan) => !plan.hidden) + direction;
    if (direction && next >= 0 && next < plans.length) { show(next); event.preventDefault(); }
  });
  show(0);
}

document.querySelectorAll(".step").forEach(followPointer);
document.querySelectorAll(".curve").forEach(showPlans);
