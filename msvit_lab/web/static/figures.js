// Figures: numbers as text, and where on the page they stand.

const part = (id) => document.getElementById(id);

function set(id, text, value) {
  const data = document.createElement("data");
  data.value = value ?? "";
  data.textContent = text;
  part(id).replaceChildren(data);
}

const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;
const giga = (macs) => (macs / 1e9).toPrecision(3);
const milliseconds = (ms) => (ms < 10 ? ms.toFixed(1) : ms.toFixed(0));
const times = (ratio) => `${ratio.toFixed(2)} ×`;

/** Tokens and multiply-adds, which follow from the number of fine cells. */
export function showCost(about, numFine) {
  const num = about.rows * about.columns;
  const [tokens, most] = [about.tokens[numFine], about.tokens[num]];
  const [macs, dense] = [about.macs[numFine], about.dense_macs];
  set("tokens", tokens, tokens);
  set("denseTokens", most, most);
  set("tokenRatio", percent(tokens / most), tokens / most);
  set("macs", giga(macs), macs);
  set("denseMacs", giga(dense), dense);
  set("macRatio", percent(macs / dense), macs / dense);
  return { tokens, most, macs, dense };
}

export function budgetText(about, numFine) {
  const num = about.rows * about.columns;
  return `${numFine} of ${num} cells fine · ${percent(about.macs[numFine] / about.dense_macs)} of dense`;
}

/** Measured times; null where nothing has been measured yet. */
export function showTimes(mixed, dense) {
  set("ms", mixed === null ? "…" : milliseconds(mixed), mixed);
  set("denseMs", dense === null ? "–" : milliseconds(dense), dense);
  if (mixed === null || dense === null) set("msRatio", "–");
  else set("msRatio", percent(mixed / dense), mixed / dense);
}

export const className = (about, label) => about.classes?.[label] ?? `class ${label}`;

/** The most probable classes with bars. */
export function showTop(id, about, probabilities, num = 3) {
  const order = Array.from(probabilities, (_, label) => label)
    .sort((a, b) => probabilities[b] - probabilities[a] || a - b)
    .slice(0, num);
  const items = order.map((label) => {
    const [item, name, value] = ["li", "span", "data"].map((tag) => document.createElement(tag));
    name.textContent = name.title = className(about, label);
    value.value = probabilities[label];
    value.textContent = percent(probabilities[label], 1);
    item.style.setProperty("--share", percent(probabilities[label], 1).replace(" ", ""));
    item.append(name, value);
    return item;
  });
  part(id).replaceChildren(...items);
  return order[0];
}

/** The result in one sentence or two. */
export function sentence(about, cost, found, mixedMs, denseMs) {
  const words = [
    `${cost.tokens} of ${cost.most} tokens, ${giga(cost.macs)} of ${giga(cost.dense)} GMACs ` +
      `(${percent(cost.macs / cost.dense)}).`,
  ];
  if (found.mixed !== null && found.dense !== null) {
    const [mixed, dense] = [className(about, found.mixed), className(about, found.dense)];
    words.push(mixed === dense ? `Both models say “${mixed}”.` : `Mixed says “${mixed}”, dense “${dense}”.`);
  }
  if (mixedMs !== null && denseMs !== null) words.push(`Here it is ${times(denseMs / mixedMs)} as fast as dense.`);
  return words.join(" ");
}
