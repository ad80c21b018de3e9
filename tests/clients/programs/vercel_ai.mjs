// The Vercel AI SDK by its providers for such servers: steps with a tool, streams, and objects under a schema.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, apiKey, name] = [process.env.BASE_URL, "none", process.env.MODEL];
const openai = createOpenAI({ baseURL, apiKey });
const compatible = createOpenAICompatible({
  name: "loraplex", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true,
});
const schema = z.object({ city: z.enum(["Oslo", "Rome"]) });
const prompt = "What is the weather in Oslo?";

for (const model of [openai.chat(name), openai.responses(name), compatible(name)]) {
  const options = { model, maxOutputTokens: 48, temperature: 0, maxRetries: 0 };
  const asked = [];
  const execute = async ({ city }) => asked.push(city) && `rain in ${city}`;
  const tools = { get_weather: tool({ description: "The weather in a city.", inputSchema: schema, execute }) };
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
  const made = await generateText({ ...options, tools, prepareStep, stopWhen: stepCountIs(2), prompt });
  assert.equal(made.steps.length, 2);
  assert.ok(["Oslo", "Rome"].includes(asked[0]));
  const streamed = streamText({ ...options, prompt: "Hello!" });
  for await (const part of streamed.textStream) assert.equal(typeof part, "string");
  assert.ok((await streamed.usage).inputTokens > 0);
  const object = await generateText({ ...options, output: Output.object({ schema }), prompt });
  schema.parse(object.output);
}
