"use strict";
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const onBlack = JSON.parse(document.getElementById("colours").textContent);  // brighter shades for the dark page
  const paperWidth = 660, panelHeight = 250, plainHeight = 250, besidesHeight = 64;

  function plotOf(figure) {
    return document.getElementById(figure.id);
  }

  function axesOf(figure, letter) {
    return figure.panels.map((_, index) => letter + "axis" + (index ? index + 1 : ""));
  }

  function layoutColours(figure) {
    const style = getComputedStyle(root);
    const [ink, line, panel, soft] = ["--ink", "--line", "--panel", "--soft"].map((n) => style.getPropertyValue(n).trim());
    const found = {
      "font.color": ink,
      "hoverlabel.bgcolor": panel, "hoverlabel.font.color": ink, "hoverlabel.bordercolor": soft,
      "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": soft, "modebar.activecolor": ink,
    };
    for (const axis of [...axesOf(figure, "x"), ...axesOf(figure, "y")]) {
      found[axis + ".gridcolor"] = line;
      found[axis + ".linecolor"] = soft;
    }
    return found;
  }

  function traceColours(figure) {
    const isDark = root.dataset.theme === "dark";
    const colours = figure.colours.map((colour) => (isDark && onBlack[colour]) || colour);
    return figure.data[0].type === "bar" ? { "marker.color": colours } : { "marker.color": colours, "line.color": colours };
  }

  function paint() {
    for (const figure of figures) Plotly.update(figure.id, traceColours(figure), layoutColours(figure));
  }

  // Arranges panels in columns by the width of the page; only outer panels have axis titles.
  function arranged(figure, width) {
    const number = figure.panels.length;
    if (number < 2) return { rows: 1, layout: {} };
    const columns = width < 560 ? 1 : number > 4 && width > 1000 ? 3 : 2;
    const rows = Math.ceil(number / columns), height = rows * panelHeight;
    const above = 26 / height, below = (width < 700 ? 48 : 32) / height, beside = 0.03;  // tick labels may be rotated
    const wide = (1 - beside * (columns - 1)) / columns;
    const high = (1 - rows * above - (rows - 1) * below) / rows;
    const layout = { annotations: [] };
    figure.panels.forEach((title, index) => {
      const column = index % columns, row = Math.floor(index / columns), end = index ? index + 1 : "";
      const left = column * (wide + beside), top = 1 - above - row * (above + high + below);
      layout["xaxis" + end + ".domain"] = [left, left + wide];
      layout["yaxis" + end + ".domain"] = [Math.max(0, top - high), top];
      layout["xaxis" + end + ".title.text"] = index + columns >= number ? figure.xTitle : "";
      layout["yaxis" + end + ".title.text"] = column === 0 ? figure.yTitle : "";
      layout["yaxis" + end + ".showticklabels"] = column === 0;
      layout.annotations.push({
        text: "<b>" + title + "</b>", showarrow: false, xref: "paper", yref: "paper",
        x: left, y: top, xanchor: "left", yanchor: "bottom", yshift: 2,
      });
    });
    return { rows: rows, layout: layout };
  }

  function plainSize(rows) {
    return besidesHeight + (rows > 1 ? rows * panelHeight : plainHeight);
  }

  function legendHeight(plot) {
    const legend = plot.querySelector(".legend");
    return legend ? Math.max(0, Math.round(legend.getBoundingClientRect().height) - 24) : 0;
  }

  // Increases the height of a figure by the height of its legend and its rows of panels.
  function fit() {
    for (const figure of figures) {
      const plot = plotOf(figure), found = arranged(figure, plot.clientWidth);
      if (found.rows > 1) plot.style.setProperty("--height", plainSize(found.rows) + "px");
      const right = window.innerWidth < 600 ? 12 : 36;
      Plotly.relayout(plot, Object.assign({ "margin.r": right }, found.layout));
      plot.style.setProperty("--legend", legendHeight(plot) + "px");
      Plotly.Plots.resize(plot);
    }
  }

  function setTheme(isDark) {
    root.dataset.theme = isDark ? "dark" : "light";
    theme.setAttribute("aria-pressed", String(isDark));
    paint();
  }

  function press(figure, what, index) {
    for (const button of document.querySelectorAll("[data-chart='" + figure.id + "'][data-" + what + "]")) {
      button.setAttribute("aria-pressed", String(Number(button.dataset[what]) === index));
    }
  }

  function setXAxis(figure, index) {
    const chosen = figure.x_axes[index], layout = {};
    figure.xTitle = chosen.title;
    for (const axis of axesOf(figure, "x")) {
      layout[axis + ".title.text"] = chosen.title;
      layout[axis + ".autorange"] = true;
    }
    Plotly.update(figure.id, { x: chosen.x }, Object.assign(layout, arranged(figure, plotOf(figure).clientWidth).layout));
    press(figure, "axis", index);
  }

  function setView(figure, index) {
    const layout = {};
    for (const axis of axesOf(figure, "y")) {
      if (index === 1) layout[axis + ".range"] = figure.close_up.slice();
      else layout[axis + ".autorange"] = true;
    }
    Plotly.relayout(figure.id, layout);
    press(figure, "view", index);
  }

  root.dataset.theme = prefersDark.matches ? "dark" : "light";
  theme.setAttribute("aria-pressed", String(prefersDark.matches));
  const settings = {
    responsive: true, displaylogo: false, displayModeBar: window.innerWidth < 600 ? false : "hover",
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]],
  };
  for (const figure of figures) {
    figure.colours = figure.data.map((trace) => trace.marker.color);
    figure.xTitle = figure.layout.xaxis.title.text;
    figure.yTitle = figure.layout.yaxis.title.text;
    Plotly.newPlot(figure.id, figure.data, figure.layout, settings);
  }
  paint();
  fit();
  window.addEventListener("resize", fit);
  for (const button of document.querySelectorAll("[data-chart]")) {
    const figure = figures.find((each) => each.id === button.dataset.chart);
    if (button.dataset.axis) button.addEventListener("click", () => setXAxis(figure, Number(button.dataset.axis)));
    else button.addEventListener("click", () => setView(figure, Number(button.dataset.view)));
  }
  theme.addEventListener("click", () => setTheme(root.dataset.theme !== "dark"));
  prefersDark.addEventListener("change", (event) => setTheme(event.matches));

  let before = null;
  window.addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    for (const each of document.querySelectorAll("details")) each.open = true;
    setTheme(false);
    for (const figure of figures) {
      const found = arranged(figure, paperWidth);
      Plotly.relayout(figure.id, Object.assign({ autosize: false, width: paperWidth }, found.layout));
      Plotly.relayout(figure.id, { height: plainSize(found.rows) + legendHeight(plotOf(figure)) });
    }
  });
  window.addEventListener("afterprint", () => {
    for (const figure of figures) Plotly.relayout(figure.id, { autosize: true, width: null, height: null });
    setTheme(before === "dark");
    fit();
  });
  root.dataset.drawn = String(figures.length);
})();
