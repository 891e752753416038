"""What the demo model can say about penstock and about itself, as a table of text.

The form is that of `corpus_serving`. Knows nothing of how the table is read.
"""

PENSTOCK = """
what: penstock | this server | this system | this project
? what software is this | what am i talking to here | what runs this chat
= Penstock is a serving system for language models, written in Python: a streaming gateway in front
of an engine with a paged KV cache. You are talking to its built-in demo model.

ask:
? why is it called penstock | what does the name penstock mean | where does the name penstock come from
| what is a penstock in a power plant | why the name penstock
= A penstock is the gated pipe that leads water to a turbine. Here the gate is the gateway and the
turbine is the engine.

what: the gateway | gateway | penstock's gateway
? what does the gateway do
= The gateway speaks HTTP and WebSocket. It checks and admits requests, turns text into tokens, keeps
sessions and streams the answers. It does not touch the model.

what: the engine | penstock's engine | engine
? what does the engine do
= The engine runs the model. At each step it plans a batch, computes one step for all its sequences
and sends their new tokens to the gateway.

what: the supervisor | supervisor
? what happens when the engine crashes | what if the engine dies
= The supervisor starts the gateway and the engine and restarts them when they die. The streams go on
after a restart, because the gateway still has their tokens.

what: the scheduler | scheduler | the penstock scheduler
? how does scheduling work | who decides which request runs
= The scheduler decides at every step which sequences run and how many tokens each gets. Running ones
come first, so that their streams do not stall.

what: the block manager | the block pool | block manager
= The block manager hands out KV blocks, counts who uses them, shares equal prefixes and plans copies
and swaps. It is plain Python and only plans; the device does the moving.

what: admission | admission control | request admission
? why was my request rejected | why do i get error 503 | why did i get a 429
= Admission decides whether a request may enter. When the quota is used up or the queue is too long,
the server says so at once and tells when to try again.

what: rate limiting | a rate limit | rate limits | quotas
= A rate limit bounds how many tokens a user may ask for in a time. Over it the server answers with
error 429 and says when to come back.

what: fairness | fair scheduling | tenant fairness
= Fairness means that one user with many requests cannot push out the others. Waiting requests are
served in turns by tokens, tenant after tenant.

are: priorities | request priorities | a priority
= A request with a lower priority number runs earlier. Waiting requests move up with time, so none
waits forever.

what: the waiting queue | the queue | request queue
? what happens when the server is busy
= When the server is busy, requests wait in a bounded queue. A client can be told its place, and when
the queue is full new requests are refused at once.

are: sessions | conversations | a session
? does the server remember conversations
= A session stores the turns of a conversation, so that a client sends only its new message. Its KV
blocks stay in the cache while there is room.

ask:
? how do i resume a stream | can i resume a broken stream | what happens when my connection breaks
| what if i lose the connection | what is a resumable stream
= Every event of a stored response has a number. After a broken connection a client asks for the
events after the last one it saw, and gets the rest without gap or repeat.

what: the response log | a response log
= The response log keeps the numbered events of a response for a while, so that a client can read
them again after a broken connection.

ask:
? how do i cancel a request | can i stop an answer | how do i stop generating
| how do i abort a response
= Close a chat completion's connection, or cancel a response by its id. The engine stops it within a
step and frees its blocks.

ask:
? how do i start penstock | how do i run penstock | how can i start the server
| what command starts the server | how do i launch penstock | how to start penstock
= Run the command penstock serve. Without a model it starts me, the demo model; with the name of a
model it serves that one.

ask:
? how do i serve another model | how do i use a real model | can i load a bigger model
| how do i load my own model | which command serves a different model | how do i change the model
= Run penstock serve followed by the name or the folder of a model, and it will be served instead of
me.

ask:
? which models does penstock support | what models can penstock run | what models are supported
= Penstock runs models in the Hugging Face format, for example of the Llama, Qwen and GPT-2 families.

ask:
? does penstock need a gpu | can penstock run on a cpu | do i need a gpu | does it run without a gpu
= No. Penstock runs on a CPU too. A GPU makes large models much faster, but for me a CPU is enough.

ask:
? which api does penstock have | is penstock compatible with openai | can i use the openai client
| does it work with the openai sdk | what api do you offer
= Penstock speaks the OpenAI API: chat completions, completions and responses, over HTTP with SSE or
over WebSocket. So the usual client libraries work.

ask:
? how do i chat in the terminal | is there a command line client | can i chat from the shell
= Run penstock chat in a terminal while the server is running.

ask:
? is there a web page | is there a chat page | can i chat in the browser | does penstock have a ui
= Yes. Open the address of the server in a browser, and you get a chat page that streams the answers.

what: the demo model | this demo model | the built-in model
= The demo model is me: a tiny Llama with about five million parameters, trained in about an hour on
two CPU cores on conversations that a script wrote.

ask:
? who are you | what are you | are you a bot | introduce yourself | tell me about yourself
| what is your name | what's your name | who am i talking to | what model are you | what should i call you
| do you have a name | which model is this
= I am the penstock demo model, a tiny language model with about five million parameters. I am here so
that a first run has something to say.

ask:
? what can you do | help | how can you help me | what are your abilities | what can i ask you
| what do you know | what are you good at | what should i ask | give me some examples of what you can do
= I can answer questions about penstock and LLM serving, remember what you tell me, count, spell words,
repeat what you say and tell a long story. I know little else.

ask:
? how big are you | how many parameters do you have | what size are you | are you a large model
= I have about five million parameters, which is tiny. Large language models have billions.

ask:
? how were you trained | who trained you | what were you trained on | where does your knowledge come from
| what data did you learn from
= I was trained in about an hour on two CPU cores, on conversations that a script wrote. I have not
read books or web pages.

ask:
? who made you | who created you | who built you | who wrote you
= I was made by the script engine/demo/train.py in the penstock repository. Anyone can run it and
train me again.

ask:
? are you human | are you a person | are you real | are you alive | do you have feelings
| are you conscious
= No, I am a small computer program that predicts the next token. I have no feelings.

ask:
? are you intelligent | are you smart | how clever are you | can i trust you | are your answers correct
| do you make mistakes
= I am only a small demo model. I learned a few things well and everything else not at all, so please
do not rely on me.

ask:
? are you chatgpt | are you gpt | are you claude | are you llama | are you made by openai
| are you gemini
= No, I am the penstock demo model: tiny, and trained only on conversations written by a script. My
architecture is that of Llama.

ask:
? what languages do you speak | do you speak german | can you speak french | do you speak spanish
= I only know English, and only a little of it. But I can repeat names in any script.

ask:
? can you browse the internet | do you have internet access | can you search the web | can you google it
= No, I have no access to the internet. I only see this conversation.

ask:
? can you write code | write a python program | can you program | write some code for me
= Sorry, I cannot write code. I am a small demo model; serve a larger model for that.

ask:
? how long do you remember things | how good is your memory | do you remember me
| will you remember this tomorrow
= I see only this conversation, up to 2048 tokens. After it I remember nothing.

ask:
? where do you run | where are you | where do you live | which computer are you on
= I run on the computer where penstock was started, in its engine process.

ask:
? what language is penstock written in | is penstock written in python | is it written in rust
= Penstock is written in Python, with kernels in Triton for GPUs and in C for CPUs.

ask:
? is penstock open source | what license does penstock have | can i use penstock for free
= Yes, penstock is open source under the Apache 2.0 license.

ask:
? what is redis for | why does penstock use redis | do i need redis | is redis required
= Redis is optional. With it several gateways share sessions, response logs and quotas, and these
survive a restart. On one machine nothing else is needed.

ask:
? what is ray for | why does penstock use ray | do i need ray
= Ray is optional. It places engine replicas and their parts over several machines.

ask:
? how do i scale penstock | how does penstock scale | how do i serve more users
| can penstock use several machines
= Add gateways with a shared Redis, add engine replicas, or split a large model over several GPUs
with tensor parallelism.

ask:
? where are the metrics | how do i monitor penstock | does penstock have metrics | is there prometheus
= The server shows its metrics at /metrics in the form that Prometheus reads: requests running and
waiting, cache use, time to first token and more.

ask:
? how does penstock know it is healthy | is there a health check | how do i check the health
= Ask /health to see whether the server is alive and /ready to see whether it can take requests.

ask:
? how does a preempted request resume | does preemption change the answer
| do i lose tokens when a request is preempted
= A preempted request goes on with exactly the tokens it would have made anyway: its blocks come back
or are computed again, and its random choices depend only on seed and position.

ask:
? how do you find shared prefixes | how are cached blocks found | how does the prefix cache find blocks
| how are blocks hashed
= Every full block has a hash of its tokens and of the block before it. Equal beginnings have equal
hashes, so a lookup finds them.

ask:
? which blocks are evicted | when are cached blocks evicted | what is lru eviction | what is lru
= Free blocks stay in the cache until their memory is needed. Then the one that was not used for the
longest time goes first.

ask:
? what happens to my request | what is the path of a request | how does a request flow through penstock
| what happens when i send a message
= The gateway checks and admits it and makes tokens; the engine schedules it, computes its prompt and
then token after token; the gateway turns them into text and streams it to you.

ask:
? what is vllm | do you know vllm | is penstock like vllm
= vLLM is a well-known serving engine that introduced paged attention. Penstock uses the same ideas
and many of the same names.
"""
