// Shared by the pages: texts in the reader's language (English here, Spanish in `SPANISH`), elements, numbers.

const $ = (id) => document.getElementById(id);
/** Marks a text for translation; it is shown later. */
const _ = (template) => template;
const spoken = (text) => (language === "es" && Object.hasOwn(SPANISH, text) ? SPANISH[text] : text);
const say = (template, values = {}) => spoken(template).replace(/\{(\w+)[^}]*\}/g, (_found, name) => String(values[name]));

const MISSING = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);
const decimals = (value, digits = 0) => (known(value) ? value.toLocaleString(language, { maximumFractionDigits: digits, useGrouping: "always" }) : MISSING);
const percent = (part, digits = 0) => (known(part) ? part.toLocaleString(language, { style: "percent", maximumFractionDigits: digits }) : MISSING);

function make(tag, text, parent, attributes = {}) {
  const made = Object.assign(document.createElement(tag), attributes);
  if (text !== undefined && text !== null) made.textContent = text;
  parent?.append(made);
  return made;
}

/** Translates the texts in the page's HTML. */
function sayAll() {
  document.documentElement.lang = language;
  for (const element of document.querySelectorAll("[data-text]")) {
    element.dataset.text ||= element.textContent;
    element.textContent = say(element.dataset.text);
  }
  for (const element of document.querySelectorAll("[data-label]:not(td)")) element.setAttribute("aria-label", say(element.dataset.label));
  $("language").lang = language === "es" ? "en" : "es";
}

/** The data of each server-sent event, until the stream ends. */
async function* streamed(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let parts = [];
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const [first, ...others] = value.split("\n");
      parts.push(first);
      for (const line of others) {
        const whole = parts.join("");
        parts = [line];
        if (whole.startsWith("data:")) yield whole.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
