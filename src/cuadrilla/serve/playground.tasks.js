// Tasks of one's own

const tasks = {
  schemas: [], state: "", values: {}, failure: null, asking: false,

  async read() {
    this.schemas = await this.known();
    if (!MODELS.length && !this.schemas.length) throw new Failure("nothing");
    $("tasks").hidden = !this.schemas.length;
    $("task").replaceChildren();
    this.schemas.forEach((schema, place) => make("option", String(schema?.model), $("task"), { value: place }));
    if (this.schemas.length) this.choose();
  },

  /** None of a server of another make, behind a gateway, which has no such page. */
  async known() {
    try {
      const told = await (await ask("/v1/predict")).json();
      return Array.isArray(told) ? told : [];
    } catch (error) {
      if (error instanceof Failure && error.status === 404) return [];
      throw error;
    }
  },

  get schema() {
    return this.schemas[$("task").value] ?? {};
  },

  choose() {
    $("takes").textContent = pretty(this.schema.inputs ?? {});
    $("gives").textContent = pretty(this.schema.outputs ?? {});
    $("inputs").value = pretty(example(this.schema.inputs ?? {}, this.schema.inputs ?? {}));
    Object.assign(this, { state: "", failure: null });
    $("outputs").hidden = true;
    this.show();
  },

  async ask() {
    if (this.asking || !this.schemas.length) return;
    Object.assign(this, { asking: true, state: "predicting", failure: null });
    $("outputs").hidden = true;
    this.show();
    const began = performance.now();
    try {
      const answer = await ask("/v1/predict", { body: { model: this.schema.model, inputs: this.inputs } });
      $("outputs").textContent = pretty((await answer.json())?.outputs);
      $("outputs").hidden = false;
      Object.assign(this, { state: "answered", values: { n: figure(performance.now() - began) } });
    } catch (error) {
      Object.assign(this, { state: "", failure: Failure.of(error) });
    }
    this.asking = false;
    this.show();
  },

  get inputs() {
    try {
      return JSON.parse($("inputs").value);
    } catch (error) {
      throw new Failure("notJson", { values: { reason: error.message } });
    }
  },

  show() {
    $("predicted").textContent = this.state && say(this.state, this.values);
    $("predict").disabled = this.asking;
    if (this.failure) this.failure.showIn($("unpredicted"));
    else $("unpredicted").replaceChildren();
  },
};

/** A value that a JSON schema allows, as far as is easily said. */
function example(schema, root, depth = 0) {
  const one = schema.$ref ? root.$defs?.[schema.$ref.split("/").pop()] : schema.anyOf?.[0] ?? schema.prefixItems;
  if (depth > 8) return null;
  if (Array.isArray(one)) return one.map((item) => example(item, root, depth + 1));
  if (one && one !== schema) return example(one, root, depth + 1);
  if ("default" in schema || "const" in schema) return schema.default ?? schema.const;
  if (schema.enum) return schema.enum[0];
  const least = Math.min(schema.minItems ?? 1, 1024);
  switch (schema.type) {
    case "array": return Array.from({ length: Math.max(least, 1) }, () => example(schema.items ?? {}, root, depth + 1));
    case "object": return Object.fromEntries(Object.entries(schema.properties ?? {})
      .map(([name, part]) => [name, example(part, root, depth + 1)]));
    case "integer": case "number": return schema.minimum ?? 0;
    case "boolean": return false;
    case "string": return "";
    default: return null;
  }
}

/** JSON over several lines; a list of numbers or texts stays on one. */
function pretty(value, indent = "") {
  const deeper = `${indent}  `;
  const isNested = (one) => typeof one === "object" && one !== null;
  if (!isNested(value) || !Object.values(value).some(isNested)) {
    return (JSON.stringify(value, null, 1) ?? "null").replace(/\n */g, " ");
  }
  const parts = Array.isArray(value) ? value.map((one) => pretty(one, deeper))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${pretty(one, deeper)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return `${open}\n${parts.map((part) => deeper + part).join(",\n")}\n${indent}${close}`;
}
