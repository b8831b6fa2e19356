// VS Code's own test client against a server of discolab; see test_vscode_client.py.
// Usage: node vscode_client.cjs FOLDER_OF_NODE_MODULES PORT TOKEN SOURCE_FILE LINE
const [, , modules, port, token, file, line] = process.argv;
const { createRequire } = require("module");
const { DebugClient } = createRequire(modules + "/")("@vscode/debugadapter-testsupport");
const assert = require("assert");

async function main() {
  const client = new DebugClient("node", "", "discolab");
  await client.start(Number(port));
  client.defaultTimeout = 20000;
  const { body: can } = await client.initializeRequest();
  assert(can.supportsConfigurationDoneRequest && can.supportsSingleThreadExecutionRequests);
  const ready = client.waitForEvent("initialized", 20000);
  await client.attachRequest({ token });
  await ready;
  const placed = await client.setBreakpointsRequest({
    source: { path: file },
    breakpoints: [{ line: Number(line), condition: "i == 1" }],
  });
  assert(placed.body.breakpoints[0].verified);
  const stop = client.assertStoppedLocation("breakpoint", { path: file, line: Number(line) });
  await client.configurationDoneRequest();
  console.log("ready"); // the program is begun now
  await stop;
  const { body: { threads } } = await client.threadsRequest();
  assert.deepStrictEqual(threads.map((one) => one.id), [1, 2, 3, 4]);
  const next = client.assertStoppedLocation("step", { path: file, line: Number(line) + 1 });
  await client.nextRequest({ threadId: 1 });
  await next;
  const { body: { stackFrames } } = await client.stackTraceRequest({ threadId: 4 });
  const { body: { scopes } } = await client.scopesRequest({ frameId: stackFrames[0].id });
  const { body: { variables } } = await client.variablesRequest({
    variablesReference: scopes[0].variablesReference,
  });
  assert.strictEqual(variables.find((one) => one.name === "rank").value, "3");
  const found = await client.evaluateRequest({
    expression: "x.shape[1] + rank", frameId: stackFrames[0].id, context: "watch",
  });
  assert.strictEqual(found.body.result, "6");
  await assert.rejects(client.customRequest("nosuch"));
  const going = client.waitForEvent("continued", 20000);
  await client.setBreakpointsRequest({ source: { path: file }, breakpoints: [] });
  await client.continueRequest({ threadId: 1 });
  assert.strictEqual((await going).body.allThreadsContinued, true);
  await client.disconnectRequest({});
  console.log("done");
  process.exit(0);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
