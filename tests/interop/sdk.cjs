// The CloudEvents SDK for JavaScript on the command line: a JSON array of requests on standard input, of answers on output.
// A message is { headers, key, body } with the body in base64; AMQP's content type is among the headers, as over HTTP,
// whose binding writes the same "ce-" headers (the SDK has none for AMQP 0-9-1).
"use strict";
const { createHash } = require("node:crypto");
const { CloudEvent, HTTP, Kafka } = require("cloudevents");

// What a foreign producer has to compute: see "Events of other producers" in consumer/README.md.
// Names beyond ASCII sort by UTF-16 units in RFC 8785, which is how JavaScript compares strings.
function canonical(value) {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const members = Object.keys(value).sort().map((name) => `${JSON.stringify(name)}:${canonical(value[name])}`);
  return `{${members.join(",")}}`;
}

function digest(tenant, operation, type, version, epoch, data) {
  const { _private, ...material } = data;
  const binding = `jcs-sha256:${createHash("sha256").update(canonical(material)).digest("hex")}`;
  const hash = createHash("sha256");
  for (const part of ["fencepost.digest.v1", tenant, operation, type, version, epoch, binding]) {
    const octets = Buffer.from(String(part));
    const length = Buffer.alloc(4);
    length.writeUInt32BE(octets.length);
    hash.update(length).update(octets);
  }
  return `sha256-v1:${hash.digest("hex")}`;
}

function read({ broker, headers, key, body }) {
  const raw = Buffer.from(body, "base64");
  const event =
    broker === "kafka" ? Kafka.toEvent({ headers, key, value: raw }) : HTTP.toEvent({ headers, body: raw.toString() });
  return JSON.parse(event.toString());
}

function write({ broker, mode, event }) {
  const [, type, version] = event.type.match(/^(.*)\.v(\d+)$/);
  const fpdigest = digest(event.fptenant, event.fpoperation, type, version, event.fpepoch, event.data);
  const made = new CloudEvent({ fpdigest, ...event });
  const message = (broker === "kafka" ? Kafka : HTTP)[mode](made);
  const body = typeof message.body === "string" ? message.body : JSON.stringify(message.body);
  return { headers: message.headers, key: message.key, body: Buffer.from(body).toString("base64") };
}

// Against the schema of AsyncAPI 3.0, which brings its own copy of draft-07; or against a schema of ours (2020-12).
function validate({ document, value, format }) {
  const asyncapi = format === "asyncapi";
  const Ajv = (asyncapi ? require("ajv") : require("ajv/dist/2020")).default;
  const ajv = new Ajv({ strict: false, allErrors: true, ...(asyncapi && { meta: false, validateSchema: false }) });
  require("ajv-formats").default(ajv);
  const check = ajv.compile(asyncapi ? require("@asyncapi/specs").schemas["3.0.0"] : document);
  return check(asyncapi ? document : value) ? [] : check.errors.map((e) => `${e.instancePath} ${e.message}`);
}

const requests = JSON.parse(require("node:fs").readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(requests.map((request) => ({ read, write, validate })[request.op](request))));
