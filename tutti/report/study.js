"use strict";
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");

  function colours() {
    const style = getComputedStyle(root);
    const ink = style.getPropertyValue("--ink").trim();
    const line = style.getPropertyValue("--line").trim();
    const panel = style.getPropertyValue("--panel").trim();
    const soft = style.getPropertyValue("--soft").trim();
    return {
      "font.color": ink,
      "xaxis.gridcolor": line, "yaxis.gridcolor": line,
      "xaxis.linecolor": soft, "yaxis.linecolor": soft,
      "hoverlabel.bgcolor": panel, "hoverlabel.font.color": ink, "hoverlabel.bordercolor": soft,
      "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": soft, "modebar.activecolor": ink,
    };
  }

  function paint() {
    for (const figure of figures) Plotly.relayout(figure.id, colours());
  }

  function legendHeight(plot) {
    const legend = plot.querySelector(".legend");
    return legend ? Math.max(0, Math.round(legend.getBoundingClientRect().height) - 24) : 0;
  }

  // A legend of many lines would leave no room for the plot: the figure grows by it.
  function fitLegends() {
    for (const figure of figures) {
      const plot = document.getElementById(figure.id);
      plot.style.setProperty("--legend", legendHeight(plot) + "px");
      Plotly.Plots.resize(plot);
    }
  }

  function setTheme(isDark) {
    root.dataset.theme = isDark ? "dark" : "light";
    theme.setAttribute("aria-pressed", String(isDark));
    paint();
  }

  function setWay(figure, index) {
    const way = figure.ways[index];
    Plotly.update(figure.id, { x: way.x }, { "xaxis.title.text": way.title, "xaxis.autorange": true });
    for (const button of document.querySelectorAll("[data-chart='" + figure.id + "']")) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.way) === index));
    }
  }

  root.dataset.theme = prefersDark.matches ? "dark" : "light";
  const settings = {
    responsive: true, displaylogo: false, displayModeBar: window.innerWidth < 600 ? false : "hover",
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]],
  };
  for (const figure of figures) Plotly.newPlot(figure.id, figure.data, figure.layout, settings);
  fitLegends();
  window.addEventListener("resize", fitLegends);
  for (const button of document.querySelectorAll("[data-chart]")) {
    const figure = figures.find((each) => each.id === button.dataset.chart);
    button.addEventListener("click", () => setWay(figure, Number(button.dataset.way)));
  }
  setTheme(prefersDark.matches);
  theme.addEventListener("click", () => setTheme(root.dataset.theme !== "dark"));
  prefersDark.addEventListener("change", (event) => setTheme(event.matches));

  let before = null;
  window.addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    for (const each of document.querySelectorAll("details")) each.open = true;
    setTheme(false);
    for (const figure of figures) {
      Plotly.relayout(figure.id, { autosize: false, width: 660 });
      Plotly.relayout(figure.id, { height: 310 + legendHeight(document.getElementById(figure.id)) });
    }
  });
  window.addEventListener("afterprint", () => {
    for (const figure of figures) Plotly.relayout(figure.id, { autosize: true, width: null, height: null });
    setTheme(before === "dark");
  });
  root.dataset.drawn = String(figures.length);
})();
