// A form out of a JSON schema: a field for each property, with the schema's own words beside it. What is left empty is
// left out, and the service takes its default. Nothing is checked here: the service says what is wrong, field by field.
import { fill, h, newId, put } from "./dom.js";

const OPEN = new Set(["recipe", "data", "optimizer", "workers"]);

/** document: of the API. value(): what the form holds. */
export class Form {
  constructor(document_, value, changed) {
    this.schemas = document_.components.schemas;
    this.changed = changed;
    this.element = h("div", { class: "form" });
    this.show(value);
  }

  /** Fill the form with this job. */
  show(value) {
    this.fields = new Map();
    const kind = value?.recipe?.name === "script" ? "ScriptSpec" : "TrainSpec";
    this.root = this.object(this.schemas[kind], value ?? {}, "");
    fill(this.element, this.root.element);
  }

  get value() { return this.root.read(); }

  /** Show what is wrong at the fields. Returns the problems for which there is none. */
  refuse(problems) {
    for (const field of this.fields.values()) field.refuse("");
    return problems.filter(({ path, message }) => {
      const field = this.at(path);
      field?.refuse([field.said, message].filter(Boolean).join("; "));
      return !field;
    });
  }

  /** The field of a path such as optimizer.betas.1, or of the innermost thing around it that has one. */
  at(path) {
    for (let parts = path.split("."); parts.length; parts.pop()) if (this.fields.has(parts.join("."))) return this.fields.get(parts.join("."));
    return null;
  }

  resolve(schema) {
    if (schema?.$ref) return { ...this.resolve(this.schemas[schema.$ref.split("/").at(-1)]), ...(schema.description ? { description: schema.description } : {}) };
    return schema ?? {};
  }

  object(schema, value, path, skip = []) {
    const given = value && typeof value === "object" && !Array.isArray(value) ? value : {};
    const names = Object.keys(schema.properties ?? {}).filter((name) => !skip.includes(name) && !("const" in this.resolve(schema.properties[name])));
    const constants = Object.entries(schema.properties ?? {}).filter(([name, one]) => !skip.includes(name) && "const" in this.resolve(one));
    // Fields that the schema does not have stay in the form, so that the service can say so.
    const foreign = Object.keys(given).filter((name) => !skip.includes(name) && !Object.hasOwn(schema.properties ?? {}, name));
    const parts = [...names.map((name) => [name, schema.properties[name]]), ...foreign.map((name) => [name, { description: "there is no such field" }])]
      .map(([name, one]) => [name, this.any(name, one, given[name], path ? `${path}.${name}` : name, (schema.required ?? []).includes(name))]);
    parts.sort(([, one], [, other]) => Number(one.wide ?? false) - Number(other.wide ?? false));
    return {
      element: h("div", { class: "fields" }, parts.map(([, part]) => part.element)),
      wide: true,
      read: () => {
        const found = {};
        for (const [name, one] of constants) if (Object.hasOwn(given, name)) found[name] = this.resolve(one).const;
        for (const [name, part] of parts) { const read = part.read(); if (read !== undefined) found[name] = read; }
        return found;
      },
    };
  }

  any(name, schema, value, path, required) {
    const choices = (schema.anyOf ?? []).filter((one) => one.type !== "null");
    const only = choices.length === 1 ? { ...this.resolve(choices[0]), description: schema.description ?? this.resolve(choices[0]).description, default: schema.default, nullable: true } : this.resolve(schema);
    const mapping = only.discriminator?.mapping;
    if (path === "recipe") {
      const kinds = { ...this.schemas.TrainSpec.properties.recipe.discriminator.mapping, script: "#/components/schemas/ScriptRecipe" };
      return this.group(name, only.description, path, value, (given, skip) => this.choice(kinds, "name", given, path, skip), required);
    }
    if (mapping) return this.group(name, only.description, path, value, (given) => this.choice(mapping, only.discriminator.propertyName, given, path), required);
    if (only.type === "object" && only.properties) return this.group(name, only.description, path, value, (given) => this.object(only, given, path), required);
    return this.leaf(name, choices.length === 1 ? only : schema, value, path, required);
  }

  /** Something inside: open where it matters at once, or where it is given. */
  group(name, description, path, value, make, required) {
    const inner = make(value), error = this.error();
    const box = h("fieldset", {}, h("legend", {}, name.replaceAll("_", " ")), description ? h("p", { class: "help" }, firstLine(description)) : null, error.element, inner.element);
    const element = OPEN.has(path) || required || value !== undefined || path.includes(".") ? box : h("details", {}, h("summary", {}, `${name.replaceAll("_", " ")}${description ? `: ${firstLine(description)}` : ""}`), box);
    this.fields.set(path, { element: box, control: box.querySelector("input, select, textarea"), refuse: error.refuse, get said() { return error.element.textContent; } });
    return {
      element, wide: true,
      read: () => {
        const found = inner.read();
        // Given and empty is not left out: `tracking: {wandb: {}}` asks for it, with its defaults.
        const empty = (one) => one && typeof one === "object" && Object.values(one).every((each) => each === null);
        return empty(found) && !empty(value) ? undefined : found;
      },
    };
  }

  choice(mapping, property, value, path) {
    const names = Object.keys(mapping), chosen = Object.hasOwn(mapping, value?.[property] ?? "") ? value[property] : "";
    const id = newId("field"), place = h("div");
    const wrong = value?.[property] !== undefined && !chosen ? String(value[property]) : null;
    const select = h("select", { id }, h("option", { value: "" }, wrong ?? "default"), names.map((one) => h("option", { value: one, selected: one === chosen }, one)));
    const words = h("p", { class: "help" }), error = this.error();
    select.setAttribute("aria-describedby", error.element.id);
    let inner = null;
    const build = (given) => {
      const schema = select.value ? this.resolve({ $ref: mapping[select.value] }) : null;
      fill(words, schema?.description ? firstLine(schema.description) : "");
      inner = schema ? this.object(schema, given, path, [property]) : null;
      fill(place, inner?.element);
    };
    build(value);
    select.addEventListener("change", () => {
      const before = { ...(inner?.read() ?? {}) };
      if (path === "recipe" && (select.value === "script") !== (chosen === "script")) {
        // Another kind of job: other fields all over.
        const all = this.value;
        all.recipe = { name: select.value };
        this.show(all);
        this.at("recipe.name")?.control.focus();
      } else {
        const known = this.resolve({ $ref: mapping[select.value] }).properties ?? {};
        build(Object.fromEntries(Object.entries(before).filter(([name]) => Object.hasOwn(known, name))));
      }
      this.changed();
    });
    this.fields.set(`${path}.${property}`, { element: select, control: select, refuse: (words_) => { error.refuse(words_); mark(select, words_); }, get said() { return error.element.textContent; } });
    return {
      element: h("div", {}, h("p", { class: "field" }, h("label", { for: id }, property), select, words, error.element), place),
      read: () => ({ ...(select.value ? { [property]: select.value } : wrong ? { [property]: wrong } : {}), ...(inner?.read() ?? {}) }),
    };
  }

  leaf(name, schema, value, path, required) {
    const id = newId("field"), helpId = newId("help"), error = this.error();
    const types = (schema.anyOf ?? [schema]).map((one) => this.resolve(one));
    const values = schema.type === "boolean" ? [true, false] : types.every((one) => one.enum || "const" in one || one.type === "null") && types.some((one) => one.enum || "const" in one)
      ? types.flatMap((one) => one.enum ?? ("const" in one ? [one.const] : [])) : null;
    const takesText = types.some((one) => one.type === "string" && !one.enum) || types.some((one) => one.enum?.some((each) => typeof each === "string"));
    const textOnly = types.every((one) => one.type === "string" || one.type === "null") && takesText;
    const fallback = schema.default === undefined ? (required ? "" : "default") : schema.default === null ? "null" : typeof schema.default === "string" ? schema.default : JSON.stringify(schema.default);
    let control;
    if (values) {
      control = h("select", { id }, required && value === undefined ? h("option", { value: "" }, "choose") : h("option", { value: "" }, `${fallback} (default)`), values.map((one) => h("option", { value: JSON.stringify(one), selected: one === value }, String(one))));
      if (value !== undefined && value !== null && !values.includes(value)) control.append(h("option", { value: JSON.stringify(value), selected: true }, JSON.stringify(value)));
    } else {
      control = h("input", { id, placeholder: fallback, autocomplete: "off", spellcheck: "false", inputmode: types.some((one) => one.type === "integer" || one.type === "number") && !takesText ? "decimal" : null });
      if (value !== undefined && value !== null) control.value = typeof value === "string" ? value : JSON.stringify(value);
    }
    control.setAttribute("aria-describedby", `${helpId} ${error.element.id}`);
    if (required) control.setAttribute("aria-required", "true");
    control.addEventListener("input", () => this.changed());
    const help = [firstLine(schema.description ?? types.find((one) => one.description)?.description ?? ""), rangeText(types)].filter(Boolean).join("; ");
    const field = { element: control, control, refuse: (words) => { error.refuse(words); mark(control, words); }, get said() { return error.element.textContent; } };
    this.fields.set(path, field);
    return {
      element: h("p", { class: "field" }, h("label", { for: id }, name.replaceAll("_", " ")), control, h("span", { class: "help", id: helpId }, help), error.element),
      read: () => {
        const text = control.value;
        if (text === "") return undefined;
        if (values) return JSON.parse(text);
        // A text that was given as one stays one, whatever it looks like.
        if (textOnly || (typeof value === "string" && text === value)) return text;
        try { return JSON.parse(text); } catch { return text; }
      },
    };
  }

  error() {
    const element = h("span", { class: "problem", id: newId("error") });
    return { element, refuse: (words) => { element.textContent = ""; put(element, words); } };
  }
}

function mark(control, words) {
  if (words) control.setAttribute("aria-invalid", "true"); else control.removeAttribute("aria-invalid");
}

const firstLine = (text) => text.split("\n\n")[0].replaceAll("\n", " ");

function rangeText(types) {
  return [...new Set(types.map((one) => {
    const low = one.minimum !== undefined ? `from ${one.minimum}` : one.exclusiveMinimum !== undefined ? `above ${one.exclusiveMinimum}` : "";
    const high = one.maximum !== undefined ? `to ${one.maximum}` : one.exclusiveMaximum !== undefined ? `below ${one.exclusiveMaximum}` : "";
    const range = [low, high].filter(Boolean).join(" ");
    if (one.enum) return types.length > 1 ? one.enum.join(", ") : "";
    return range && one.type === "integer" ? `a whole number ${range}` : range;
  }).filter(Boolean))].join(" or ");
}

/** The job without what its schema takes by default: as somebody would have written it. */
export function withoutDefaults(document_, job) {
  const schemas = document_.components.schemas;
  const resolve = (schema) => (schema?.$ref ? resolve(schemas[schema.$ref.split("/").at(-1)]) : schema ?? {});
  const prune = (schema, value) => {
    let known = resolve(schema);
    const one = (known.anyOf ?? []).filter((each) => each.type !== "null");
    if (one.length === 1) known = resolve(one[0]);
    if (known.discriminator && value && typeof value === "object") known = resolve({ $ref: known.discriminator.mapping[value[known.discriminator.propertyName]] });
    if (!known.properties || !value || typeof value !== "object" || Array.isArray(value)) return value;
    const kept = {};
    for (const [name, each] of Object.entries(value)) {
      const property = known.properties[name];
      // Of what may be null the document names no default, for it is null; then an object is none, however empty.
      const nullable = property?.anyOf?.some((choice) => choice.type === "null") && !("default" in property) && !known.required?.includes(name);
      if (nullable && each === null) continue;
      if (property && "default" in property && !("const" in property) && JSON.stringify(property.default) === JSON.stringify(each)) continue;
      const pruned = prune(property, each);
      if (!nullable && pruned && typeof pruned === "object" && !Array.isArray(pruned) && !Object.keys(pruned).length) continue;
      kept[name] = pruned;
    }
    return kept;
  };
  return prune({ $ref: job.recipe?.name === "script" ? "#/components/schemas/ScriptSpec" : "#/components/schemas/TrainSpec" }, job);
}
