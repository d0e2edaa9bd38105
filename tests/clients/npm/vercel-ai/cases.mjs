// What Vercel's AI SDK does against a server of the bundled model: `node cases.mjs URL`. See client_cases.py.

import assert from 'node:assert/strict'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { Output, generateText, streamText, tool } from 'ai'
import { z } from 'zod'

const ANNA = { name: 'Anna', age: 31, city: 'Paris' }
const person = z.object({ name: z.string(), age: z.number().int(), city: z.string() })
const provider = createOpenAICompatible({
  name: 'jaxsgl',
  baseURL: `${process.argv[2]}/v1`,
  apiKey: 'none',
  supportsStructuredOutputs: true,
})
const asked = {
  model: provider('default'),
  prompt: 'Give me JSON for Anna, 31, Paris',
  temperature: 0,
  maxOutputTokens: 100,
  maxRetries: 0,
}

const cases = {
  async chat() {
    assert.deepEqual(JSON.parse((await generateText(asked)).text), ANNA)
  },
  async stream() {
    let text = ''
    for await (const part of streamText(asked).textStream) text += part
    assert.deepEqual(JSON.parse(text), ANNA)
  },
  async tool() {
    const set_city = tool({ description: 'Sets the city.', inputSchema: z.object({ city: z.enum(['Paris', 'Rome']) }) })
    const answer = await generateText({ ...asked, tools: { set_city }, toolChoice: { type: 'tool', toolName: 'set_city' } })
    assert.ok(['Paris', 'Rome'].includes(answer.toolCalls[0].input.city))
  },
  async structured() {
    const answer = await generateText({ ...asked, output: Output.object({ schema: person }) })
    assert.deepEqual(answer.output, ANNA)
  },
}

const found = {}
for (const [name, run] of Object.entries(cases)) {
  try {
    await run()
    found[name] = null
  } catch (error) {
    console.error(error)
    found[name] = `${error.name}: ${error.message}`
  }
}
console.log(JSON.stringify(found))
process.exit(Object.values(found).some(Boolean) ? 1 : 0)
