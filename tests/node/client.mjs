// Uses OpenAI's own client against the URL given; prints what it saw as one line of JSON.
// tests/router/test_node_client.py installs the client, runs this and looks at the line.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, folder] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${folder}/package.json`));
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")).href);

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Capital of France?" }];
const ask = { model: "tiny", messages };
const seen = {};

const { data: chat, response } = await client.chat.completions.create(ask).withResponse();
seen.chat = chat.choices[0].message.content;
seen.id = response.headers.get("x-baton-request-id");

seen.stream = "";
const stream = await client.chat.completions.create({
  ...ask,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  seen.stream += chunk.choices[0]?.delta?.content ?? "";
  seen.usage = chunk.usage;
}

const helped = client.chat.completions.stream(ask);
seen.helped = (await helped.finalChatCompletion()).choices[0].message.content;

const texts = await client.completions.create({ model: "tiny", prompt: ["a", "b"], max_tokens: 40 });
seen.texts = texts.choices.map((choice) => choice.text);

seen.models = [];
for await (const model of client.models.list()) seen.models.push(model.id);

async function refused(promise) {
  try {
    await promise;
    return null;
  } catch (error) {
    return [error.constructor.name, error.status, error.param, error.code];
  }
}
seen.refused = await refused(client.chat.completions.create({ ...ask, temperature: 9 }));
seen.missing = await refused(client.models.retrieve("gpt-4"));

const left = await client.chat.completions.create({ ...ask, stream: true });
for await (const _ of left) break; // leaving in the middle closes the connection
seen.left = left.controller.signal.aborted;

console.log(JSON.stringify(seen));
