// The values of each curve at the pointer, or at the step that the arrow keys choose.
for (const figure of document.querySelectorAll("figure[data-curves]")) {
  const { left, right, width, first, last, curves } = JSON.parse(figure.dataset.curves);
  const svg = figure.querySelector("svg");
  const [chosen, ...values] = figure.querySelectorAll("output");
  let step = last;
  const show = (next) => {
    step = Math.max(first, Math.min(last, Math.round(next)));
    const x = left + ((right - left) * (step - first)) / (last - first || 1);
    svg.querySelector(".at").setAttribute("d", `M${x} 0V204`);
    chosen.textContent = `step ${step}`;
    curves.forEach(([steps, texts], i) => {
      values[i].textContent = texts[steps.findLastIndex((each) => each <= step)] ?? "";
    });
  };
  svg.addEventListener("pointermove", ({ clientX }) => {
    const box = svg.getBoundingClientRect();
    show(first + ((((clientX - box.x) * width) / box.width - left) / (right - left)) * (last - first));
  });
  svg.addEventListener("keydown", (event) => {
    const next = { ArrowLeft: step - 1, ArrowRight: step + 1, Home: first, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    show(next);
  });
}
