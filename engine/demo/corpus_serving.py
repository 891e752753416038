"""What the demo model can say about LLM serving in general, as a table of text.

One block per answer: a line of subjects (`what:`, `are:` or `why:`, read with the
question forms of `corpus_answers`), lines of further questions (`?`), the answer (`=`).
Knows nothing of how the table is read.
"""

SERVING = """
what: paged attention | pagedattention | paging the kv cache
? how are keys and values stored in pages | how is memory managed in paged attention
= Paged attention stores the keys and values of a sequence in small blocks that need not lie next
to each other. A block table says where each block is, much like the page table of an operating
system.

why: paged attention | pagedattention | paging
= Paged attention wastes almost no memory: a sequence takes a new block only when it needs one, so
many more sequences fit at once. Blocks can also be shared between sequences.

what: continuous batching | iteration-level batching | in-flight batching
? how do requests join a running batch | when can a new request join the batch
= Continuous batching forms the batch anew at every step. A finished request leaves at once and a
waiting one takes its place, so nobody waits for the longest answer.

why: continuous batching | in-flight batching
? why not wait for the whole batch to finish | is static batching worse
= Answers differ in length. With a fixed batch the short ones wait for the longest and the hardware
idles; continuous batching keeps it busy, which raises throughput several times.

what: static batching | a static batch
= Static batching runs a fixed group of requests until the last one is finished. It is simple, but
short answers wait for long ones and the hardware is partly idle.

what: prefix caching | automatic prefix caching | prefix cache | the prefix cache
? can two requests share a prompt | what happens when two prompts start the same way
= Prefix caching keeps the KV blocks of prompts already computed. When a new request starts with
the same tokens, those blocks are used again and need not be computed twice.

why: prefix caching | the prefix cache
? why are follow-up questions faster
= Prefix caching makes the first token come sooner. A system prompt or the history of a chat is the
same every time, so only the new words must be computed.

what: copy on write | copy-on-write | cow | copy on write for blocks
? what happens when a shared block is written | who may write to a shared block
= Copy on write lets sequences share a block until one of them wants to write into it. Only then
is the block copied, so that the others keep their own text.

why: copy on write | copy-on-write
= Copy on write saves memory and time. Parallel samples and beams share the blocks of their prompt
and copy only the last block, where they begin to differ.

what: preemption | preempting a request | preempting a sequence
? what happens when the memory is full | what if there are no free blocks
| what happens when blocks run out
= Preemption pauses a running request when no blocks are free. Its blocks are swapped to host
memory or dropped and computed again later, and then it goes on as if nothing had happened.

what: swapping | swap | swap space | kv swapping | swapping blocks
? where do blocks go when a request is preempted
= Swapping copies the KV blocks of a paused request from device memory to host memory, and back
when there is room again. The same bytes return, so the answer does not change.

what: recomputation | recompute | recomputing
? what is the difference between swap and recompute | swap or recompute
| is recompute better than swap
= After a preemption the KV blocks can be swapped to host memory or computed again. Recomputing is
often cheaper for short sequences, swapping for long ones.

what: chunked prefill | chunking the prefill | prefill chunks
? how are long prompts handled | what happens with a very long prompt
= Chunked prefill cuts a long prompt into pieces and computes one piece per step, together with
the decoding of other requests. So a long prompt does not stall the others.

why: chunked prefill
= Without chunked prefill one long prompt would block a step for a long time and every stream would
freeze. In chunks it shares each step with the others, so their tokens keep flowing.

what: the kv cache | kv cache | key value cache | kv caching | the key-value cache
? what is stored in the kv cache
= The KV cache holds the keys and values of all tokens seen so far. With it each new token needs
only one small step instead of reading the whole text again.

why: the kv cache | kv cache
= Without a KV cache every new token would need the whole text to be computed again. The cache
trades memory for time.

ask:
? how big is the kv cache | how much memory does the kv cache need | size of the kv cache
| how do i compute the kv cache size
= Per token the KV cache takes two vectors, key and value, for every layer and every KV head. The
size is 2 times layers times KV heads times head size times bytes per number.

what: a kv block | a block | kv blocks | block
? what is the block size | how many tokens fit in a block | how big is a block
= A block holds the keys and values of a fixed number of tokens, 16 by default. The first token of
a sequence takes one block and the 17th takes a second.

what: a block table | the block table | block tables
? how does the engine find the blocks of a sequence
= A block table maps the positions of a sequence to its blocks. It is a list of block numbers, so
the blocks may lie anywhere in memory.

what: fragmentation | memory fragmentation
= Fragmentation is memory that is free or reserved but cannot be used. Equal-sized blocks avoid it:
only the last block of a sequence can be partly empty.

what: prefill | the prefill phase | the prefill
? what happens to the prompt first
= Prefill is the first part of a request: all tokens of the prompt are computed at once and their
keys and values go into the cache. It needs much arithmetic.

what: decode | decoding | the decode phase
? how are tokens generated
= Decoding makes the answer one token at a time. Each step reads the weights and the KV cache once,
so it is limited by memory bandwidth, and batching helps a lot.

ask:
? what is the difference between prefill and decode | prefill versus decode | prefill vs decode
| how does prefill differ from decode
= Prefill computes the whole prompt at once and is limited by arithmetic. Decode makes one token per
step and is limited by memory bandwidth.

are: tokens | a token
? what is a token | how long is a token | are tokens words
= A token is a piece of text that a model reads or writes: a word, a part of a word, a sign or a
byte. Models see only token numbers.

what: a tokenizer | the tokenizer | tokenization
? how is text turned into tokens
= A tokenizer turns text into token numbers and back. Mine has 1024 tokens and works on bytes, so
any text can be written with it.

what: byte pair encoding | bpe | a bpe tokenizer
= Byte pair encoding starts with single bytes and merges the most frequent pairs again and again.
Frequent words become one token, rare ones several.

what: sampling | token sampling
? how is the next token chosen | how do you pick the next word
= Sampling chooses the next token from the probabilities that the model gives. Temperature, top-k
and top-p say how adventurous the choice may be.

what: temperature | the temperature | the temperature parameter
? how do i make answers more random | what does a high temperature do
= Temperature divides the scores before sampling. Zero always takes the likeliest token, low values
stay close to it, and high values make the text more surprising.

what: top-p | top p | nucleus sampling | top_p
= Top-p keeps the smallest set of tokens whose probabilities add up to p and samples from those. It
is also called nucleus sampling.

what: top-k | top k | top_k
= Top-k keeps only the k likeliest tokens and samples from those. Top-k of one is the same as
greedy decoding.

what: min-p | min p | min_p
= Min-p drops every token whose probability is less than p times that of the likeliest one. It
adapts to how sure the model is.

what: greedy decoding | greedy sampling | greedy
= Greedy decoding always takes the likeliest token. The answer is then the same every time.

what: beam search | beams
= Beam search follows the best few continuations side by side and keeps the best ones at every
step. In a paged cache the beams share the blocks of their common part.

what: a repetition penalty | the repetition penalty | frequency penalty | presence penalty
? how do i stop a model from repeating itself
= A penalty lowers the scores of tokens that have already appeared, so that the model repeats
itself less.

what: a stop string | stop strings | stop sequences | a stop sequence
= A stop string ends an answer as soon as it appears in the text. It is not shown, and the finish
reason is stop.

what: max tokens | max_tokens | the max_tokens limit
? how do i limit the length of an answer | why was my answer cut off | why did the answer stop
= Max tokens is the largest number of tokens an answer may have. When it is reached, the answer ends
with finish reason length.

what: a finish reason | the finish reason | finish_reason
= The finish reason says why an answer ended: stop when the model was done or a stop string came,
length when the token limit was reached.

what: a seed | the seed | the random seed
? how do i get the same answer twice | can i reproduce an answer
= A seed fixes the random choices of sampling. The same request with the same seed gives the same
answer again.

are: logprobs | log probabilities
= Logprobs are the logarithms of the probabilities of the tokens. They show how sure the model was
and which tokens it nearly chose.

what: the context window | context length | context window | the context length
? how much text can a model read | how long can a conversation be
= The context window is the largest number of tokens a model can handle at once, prompt and answer
together. Mine is 2048 tokens.

what: streaming | token streaming | response streaming
? why does the text appear word by word | how does streaming work
= Streaming sends every piece of the answer as soon as it exists, so you can read along instead of
waiting for the end.

are: server-sent events | sse | server sent events | sse streams
? what is sse | what is an event stream
= Server-sent events are a simple way to stream over HTTP: the server keeps the response open and
writes lines that begin with data. Browsers read them directly.

what: a websocket | websocket | websockets | the websocket protocol
= A WebSocket is a connection on which both sides can send messages at any time. It suits chats,
since a client can cancel or ask again without a new request.

ask:
? sse or websocket | what is the difference between sse and websocket | websocket vs sse
| should i use sse or websockets | when do i use a websocket instead of sse
= SSE is one way and plain HTTP: simple and friendly to proxies. A WebSocket goes both ways, so it
can carry several streams and cancel them. Both give the same events here.

what: backpressure | back pressure
? what happens when a client reads slowly | what about slow clients
= Backpressure means that a slow reader must not fill the memory or slow down others. Its events wait
in a bounded log, and a reader too far behind is closed and may resume.

what: time to first token | ttft
? how long until the first token
= Time to first token is the time from sending a request to its first token. It is the waiting in
the queue plus the prefill.

what: inter-token latency | itl | time per output token | tpot
= Inter-token latency is the time between two tokens of a stream. It shows how smoothly the text
flows.

what: throughput | token throughput
? how many tokens per second
= Throughput is the number of tokens a server makes per second over all requests. Larger batches
raise it, at some cost in latency.

what: latency | request latency
= Latency is how long a user waits. For a stream, time to first token and inter-token latency say
it best.

ask:
? what is the difference between latency and throughput | latency versus throughput
| latency vs throughput | throughput or latency
= Latency is how long one user waits; throughput is how much work gets done in all. Bigger batches
help throughput and may hurt latency.

what: goodput
= Goodput counts only the requests that were answered within their latency goals. A server can have
high throughput and low goodput.
"""
