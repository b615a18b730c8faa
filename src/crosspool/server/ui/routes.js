// Every route of this server with its fields, from its own OpenAPI document: no other host is asked.

import { call, setKey } from "./access.js";

const root = document.getElementById("routes");
const form = document.getElementById("key-form");

form.addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(document.getElementById("key").value);
  show();
});

async function show() {
  let response;
  try {
    response = await call("openapi.json");
  } catch {
    root.replaceChildren(element("p", "the server does not answer", "failed"));
    return;
  }
  form.hidden = response.status !== 401;
  if (!response.ok) {
    root.replaceChildren(element("p", response.status === 401 ? "a key is needed" : `HTTP ${response.status}`, "failed"));
    return;
  }
  const schema = await response.json();
  const groups = new Map();
  for (const [path, methods] of Object.entries(schema.paths)) {
    for (const [method, route] of Object.entries(methods)) {
      const tag = route.tags?.[0] ?? "others";
      groups.set(tag, [...(groups.get(tag) ?? []), routeEntry(schema, method, path, route)]);
    }
  }
  root.replaceChildren(...[...groups].map(([tag, entries]) => section(tag, entries)));
}

function section(tag, entries) {
  const found = document.createElement("section");
  found.append(element("h2", tag), ...entries);
  return found;
}

function routeEntry(schema, method, path, route) {
  const found = document.createElement("details");
  const head = document.createElement("summary");
  head.append(element("span", method, "method"), element("code", path), element("span", route.summary ?? "", "summary"));
  found.append(head);
  if (route.description) found.append(element("p", route.description));
  const parameters = (route.parameters ?? []).map((item) => [item.name, typeOf(schema, item.schema), item.description ?? ""]);
  if (parameters.length) found.append(element("h3", "In the address"), table(["name", "type", ""], parameters));
  const body = resolved(schema, route.requestBody?.content?.["application/json"]?.schema);
  if (body?.properties) {
    found.append(element("h3", "Body"), table(["field", "type", ""], fields(schema, body)));
  }
  const answers = Object.entries(route.responses ?? {}).sort(([a], [b]) => a - b);
  found.append(element("h3", "Answers"), table(["status", ""], answers.map(([status, item]) => [status, item.description ?? ""])));
  return found;
}

function fields(schema, body) {
  const required = new Set(body.required ?? []);
  return Object.entries(body.properties).map(([name, item]) => [
    name, typeOf(schema, item),
    [required.has(name) ? "required" : "", item.description ?? "", byDefault(item)].filter(Boolean).join("; "),
  ]);
}

function byDefault(item) {
  if (item.default === undefined || item.default === null) return "";
  return `default ${JSON.stringify(item.default)}`;
}

function typeOf(schema, item) {
  if (!item) return "";
  if (item.$ref) return item.$ref.split("/").at(-1);
  if (item.enum) return item.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (item.const !== undefined) return JSON.stringify(item.const);
  const union = item.anyOf ?? item.oneOf;
  if (union) return [...new Set(union.map((part) => typeOf(schema, part)))].filter((name) => name !== "null").join(" | ");
  if (item.type === "array") return `list of ${typeOf(schema, item.items) || "anything"}`;
  return item.type ?? "anything";
}

function resolved(schema, item) {
  if (!item?.$ref) return item;
  return schema.components.schemas[item.$ref.split("/").at(-1)];
}

function table(names, rows) {
  const found = document.createElement("table");
  found.className = "fields";
  const head = document.createElement("tr");
  head.append(...names.map((name) => element("th", name)));
  const top = document.createElement("thead");
  top.append(head);
  const body = document.createElement("tbody");
  body.append(...rows.map((row) => {
    const line = document.createElement("tr");
    line.append(...row.map((text, place) => {
      const cell = document.createElement("td");
      cell.append(place === 0 ? element("code", text) : text);
      return cell;
    }));
    return line;
  }));
  found.append(top, body);
  return found;
}

function element(name, text, className = "") {
  const found = document.createElement(name);
  found.textContent = text;
  if (className) found.className = className;
  return found;
}

show();
