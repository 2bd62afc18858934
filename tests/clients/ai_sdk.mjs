// Vercel's AI SDK over one provider: node --test ai_sdk.mjs, with URL, MODEL and PROVIDER in the environment.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, embedMany, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { URL: url, MODEL: name, PROVIDER: provider } = process.env;
const settings = { baseURL: `${url}/v1`, apiKey: "none" };
const openai = createOpenAI(settings);
const compatible = createOpenAICompatible({ name: "shoal", supportsStructuredOutputs: true, ...settings });
const model = {
  chat: () => openai.chat(name),
  responses: () => openai.responses(name),
  compatible: () => compatible(name),
  anthropic: () => createAnthropic(settings)(name),
}[provider]();
const ask = { model, temperature: 0, maxRetries: 0, maxOutputTokens: 100 };
const city = z.object({ name: z.string().max(20), population: z.int().min(0).max(100_000_000) });
const cities = [];
const all = async (stream) => {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
};
const get_weather = tool({
  description: "The weather in a city",
  inputSchema: z.object({ city: z.string().max(20) }),
  execute: async ({ city }) => (cities.push(city), "It is sunny."),
});
// The first step must call the tool once, the second must not.
const once = {
  openai: { parallelToolCalls: false },
  shoal: { parallel_tool_calls: false },
  anthropic: { disableParallelToolUse: true },
};
const tools = {
  providerOptions: once,
  prompt: "What is the weather in Paris?",
  tools: { get_weather },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
};

test("text is generated, and streamed the same", async () => {
  const prompt = "What is the capital of France?";
  const { text, usage } = await generateText({ ...ask, prompt, maxOutputTokens: 16 });
  assert.ok(text && usage.outputTokens <= 16);
  const parts = await all(streamText({ ...ask, prompt, maxOutputTokens: 16 }).textStream);
  assert.equal(parts.join(""), text);
  assert.ok(parts.length > 2);
});

test("a tool is called and its result answered", async () => {
  const { steps, text } = await generateText({ ...ask, ...tools });
  assert.equal(steps[0].toolCalls[0].toolName, "get_weather");
  assert.equal(steps[0].toolResults[0].output, "It is sunny.");
  assert.equal(steps[0].finishReason, "tool-calls");
  assert.ok(text && cities.length);
});

test("a tool call and the answer are streamed", async () => {
  const run = streamText({ ...ask, ...tools, onError: ({ error }) => assert.fail(error) });
  const kinds = new Set();
  for await (const part of run.fullStream) kinds.add(part.type);
  for (const kind of ["tool-input-delta", "tool-call", "tool-result", "text-delta"]) assert.ok(kinds.has(kind), kind);
});

test("an object is generated, and streamed", async () => {
  const prompt = "Paris has two million inhabitants.";
  const { output } = await generateText({ ...ask, prompt, output: Output.object({ schema: city }) });
  city.parse(output);
  const run = streamText({ ...ask, prompt, output: Output.object({ schema: city }) });
  const parts = await all(run.partialOutputStream);
  city.parse(parts.at(-1));
});

test("a mistake is an error of the call", async () => {
  await assert.rejects(generateText({ ...ask, prompt: "Hello", topP: 2 }), (error) => {
    assert.ok(APICallError.isInstance(error) && error.statusCode === 400);
    return error.message.includes("top_p");
  });
});

const embedder = { chat: () => openai.embedding(name), compatible: () => compatible.embeddingModel(name) }[provider];
test("texts are embedded", { skip: embedder ? false : "the API has no embeddings" }, async () => {
  const { embeddings } = await embedMany({ model: embedder(), values: ["one", "two"], maxRetries: 0 });
  assert.deepEqual(embeddings.map((embedding) => embedding.length), [576, 576]);
});
