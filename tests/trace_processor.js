// Loads a trace with Perfetto's trace processor, answers SQL and prints the answers as JSON.
//
//     node trace_processor.js FOLDER TRACE SQL...
//
// FOLDER holds engine_bundle.js and trace_processor.wasm of a build of Perfetto's user interface. The bundle is
// written for a worker of a browser, which `scope` stands in for; requests and answers are messages of Perfetto's
// trace_processor.proto.

const fs = require("fs");
const path = require("path");

const [folder, trace, ...statements] = process.argv.slice(2);
const PIECE = 16 << 20;
const [APPEND, FINISH, QUERY] = [1, 2, 3];

const varint = (value) => {
  const bytes = [];
  for (; value > 127; value >>>= 7) bytes.push((value & 127) | 128);
  return Buffer.from([...bytes, value]);
};
const bytesField = (number, bytes) =>
  Buffer.concat([varint((number << 3) | 2), varint(bytes.length), bytes]);
const numberField = (number, value) => Buffer.concat([varint(number << 3), varint(value)]);

// Reads numbers of variable length from `bytes`, from place `at` on.
class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }
  get left() {
    return this.at < this.bytes.length;
  }
  number() {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = this.bytes[this.at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return Number(BigInt.asIntN(64, value));
    }
  }
  slice(count) {
    this.at += count;
    return this.bytes.subarray(this.at - count, this.at);
  }
}

// The fields of a message: number to its values.
function fields(bytes) {
  const found = {};
  for (const reader = new Reader(bytes); reader.left; ) {
    const key = reader.number();
    const read = [() => reader.number(), () => reader.slice(8), () => reader.slice(reader.number())][key & 7];
    (found[key >> 3] ??= []).push(read());
  }
  return found;
}

function packed(bytes = Buffer.alloc(0)) {
  const values = [];
  for (const reader = new Reader(bytes); reader.left; ) values.push(reader.number());
  return values;
}

const answers = [];
const port = { postMessage: (bytes) => answers.push(...(fields(Buffer.from(bytes))[1] ?? []).map(fields)) };
const file = (url) => fs.readFileSync(path.join(folder, path.basename(url)));
const log = (...words) => process.stderr.write(`${words.join(" ")}\n`.slice(0, 2000));
const scope = {
  self: { location: { href: "http://trace/" } },
  process: undefined,
  WorkerGlobalScope: function () {},
  XMLHttpRequest: class {
    open(method, url) {
      this.url = url;
    }
    send() {
      this.response = Uint8Array.from(file(this.url)).buffer;
    }
  },
  console: { log, warn: log, error: log },
};

function ask(request, ...more) {
  answers.length = 0;
  const message = Buffer.concat([numberField(2, request), ...more]);
  port.onmessage({ data: new Uint8Array(bytesField(1, message)) });
  for (const answer of answers) {
    const errors = [answer[5], ...[201, 203].map((number) => answer[number] && fields(answer[number][0])[2])];
    for (const error of errors) if (error?.[0].length) throw new Error(`Perfetto: ${error[0]}`);
  }
  return answers;
}

function query(statement) {
  const rows = [];
  let names;
  for (const answer of ask(QUERY, bytesField(103, bytesField(1, Buffer.from(statement))))) {
    const result = fields(answer[203][0]);
    names ??= result[1].map(String);
    for (const batch of (result[3] ?? []).map(fields)) {
      const kinds = packed(batch[1]?.[0]);
      const whole = packed(batch[2]?.[0]);
      const doubles = batch[3]?.[0] ?? Buffer.alloc(0);
      const floats = Array.from({ length: doubles.length / 8 }, (_, index) => doubles.readDoubleLE(8 * index));
      const texts = String(batch[5]?.[0] ?? "").split("\0");
      const cells = kinds.map((kind) => [null, null, whole, floats, texts][kind]?.shift() ?? null);
      for (let at = 0; at < cells.length; at += names.length)
        rows.push(Object.fromEntries(names.map((name, index) => [name, cells[at + index]])));
    }
  }
  return rows;
}

function main() {
  const bytes = fs.readFileSync(trace);
  for (let at = 0; at < bytes.length; at += PIECE) ask(APPEND, bytesField(101, bytes.subarray(at, at + PIECE)));
  ask(FINISH);
  process.stdout.write(JSON.stringify(statements.map(query)));
  process.exit(0);
}

const bundle = new Function(...Object.keys(scope), file("engine_bundle.js").toString());
bundle(...Object.values(scope));
scope.self.onmessage({ data: port });
setImmediate(main); // the bundle reads and starts the wasm at once, and is ready when its promises are
