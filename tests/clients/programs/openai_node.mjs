// OpenAI's client for Node: tools that run by themselves, Responses with calls that go back, answers under a schema.
import assert from "node:assert";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const model = process.env.MODEL;
const ask = { role: "user", content: "What is the weather in Oslo?" };
const Weather = z.object({ city: z.enum(["Oslo", "Rome"]) });
const parameters = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const flat = { name: "get_weather", description: "The weather in a city.", parameters, strict: true };

const asked = [];
const runner = client.chat.completions.runTools(
  {
    model,
    messages: [ask],
    max_tokens: 48,
    temperature: 0,
    stream: true,
    tool_choice: { type: "function", function: { name: "get_weather" } },
    tools: [
      { type: "function", function: { ...flat, parse: JSON.parse, function: (given) => asked.push(given) && "rain" } },
    ],
  },
  { maxChatCompletions: 2 },
);
await runner.done();
assert.ok(asked.length >= 1 && ["Oslo", "Rome"].includes(asked[0].city));

const parsed = await client.chat.completions.parse({
  model, messages: [ask], max_tokens: 48, temperature: 0, response_format: zodResponseFormat(Weather, "weather"),
});
Weather.parse(parsed.choices[0].message.parsed);

const options = { model, max_output_tokens: 48, temperature: 0 };
const tools = [{ type: "function", ...flat }];
const stream = client.responses.stream({ ...options, input: [ask], tools, tool_choice: "required" });
const kinds = [];
for await (const event of stream) kinds.push(event.type);
const called = await stream.finalResponse();
assert.deepEqual(kinds.slice(0, 2), ["response.created", "response.in_progress"]);
assert.equal(kinds.at(-1), "response.completed");
const call = called.output.find((item) => item.type === "function_call");
Weather.parse(JSON.parse(call.arguments));
const result = { type: "function_call_output", call_id: call.call_id, output: "rain" };
const final = await client.responses.create({ ...options, input: [ask, ...called.output, result] });
assert.equal(final.output[0].type, "message");
const typed = await client.responses.parse({
  ...options, input: [ask], text: { format: zodTextFormat(Weather, "weather") },
});
Weather.parse(typed.output_parsed);
