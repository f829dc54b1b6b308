-- Sends requests with one of 1000 API keys each, and prints the results as JSON.
local counter = 0

function request()
  counter = (counter * 1103515245 + 12345) % 2147483648
  return wrk.format("GET", "/", { ["x-api-key"] = "key-" .. (math.floor(counter / 65536) % 1000) })
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format('\n{"requests": %d, "micros": %d, "p50": %d, "p99": %d, "errors": %d}\n', summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99), errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
