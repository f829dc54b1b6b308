-- Sends requests for random users. Arguments: the body with %s in place of the user, and the number of users.

local threads = 0

function setup(thread)
  threads = threads + 1
  thread:set('number', threads)
end

function init(arguments)
  body, users = arguments[1], tonumber(arguments[2])
  math.randomseed(number)
  wrk.method = 'POST'
  wrk.headers['Content-Type'] = 'application/json'
end

function request()
  return wrk.format(nil, nil, nil, body:format(('user:%05d'):format(math.random(0, users - 1))))
end
