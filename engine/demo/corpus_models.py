"""What the demo model can say about language models and hardware, as a table of text.

The form is that of `corpus_serving`. Knows nothing of how the table is read.
"""

MODELS = """
what: speculative decoding | speculation | draft tokens
= In speculative decoding a cheap drafter guesses several tokens and the model checks them in one
step. The guesses that fit are kept, so the result is the same but faster.

what: quantization | quantisation | int8 quantization | weight quantization
= Quantization stores numbers with fewer bits, for example 8 or 4 instead of 16. It saves memory and
bandwidth and costs a little accuracy.

what: tensor parallelism | tensor parallel | tp
? how do i run a model on several gpus
= Tensor parallelism splits every weight matrix over several devices. Each computes its part of
every layer, and they exchange sums in between.

what: pipeline parallelism | pipeline parallel
= Pipeline parallelism gives each device some of the layers. A batch passes from one to the next
like on an assembly line.

what: a replica | replicas | data parallelism
= A replica is a full copy of the model with its own cache. Several replicas serve more users, and
a router spreads the requests over them.

what: attention | self-attention | the attention mechanism
= Attention lets each token look at the tokens before it. It compares a query with all keys and
mixes the values by how well they match.

are: keys and values | queries, keys and values | keys, queries and values
= Every token makes a query, a key and a value. The query is compared with the keys of earlier
tokens, and the values are mixed by how well they match.

what: flash attention | flashattention
= Flash attention computes attention in tiles that stay in fast memory, so the big table of scores
is never written out. The result is the same, only faster.

what: multi-head attention | attention heads | an attention head
= Multi-head attention runs several small attentions side by side. Each head can look for something
different.

what: grouped-query attention | gqa | grouped query attention
= In grouped-query attention several query heads share one key and value head. That makes the KV
cache smaller.

what: a transformer | the transformer | transformers
= A transformer is a network of equal layers, each with attention and a feed-forward part. It reads
tokens and predicts the next one.

what: a large language model | an llm | llm | a language model | llms
= A language model predicts the next token of a text. Repeating that many times writes an answer.
Large ones have learned from a great deal of text.

what: inference | llm inference | model inference
= Inference means using a trained model to make answers. Training changes the weights; inference
only reads them.

what: llm serving | serving | model serving | an inference server
= LLM serving means answering many users with one model at once: queueing their requests, batching
them, keeping their KV cache and streaming the tokens back.

are: embeddings | token embeddings | an embedding
= An embedding is a list of numbers that stands for a token or a text. Similar meanings get similar
numbers.

are: weights | model weights | parameters | model parameters
= Weights are the numbers a model has learned. I have about five million of them; large models have
billions.

what: bfloat16 | bf16
= Bfloat16 is a number format with 16 bits: the range of a 32-bit float with fewer digits. It halves
the memory that weights need.

what: a gpu | a graphics card | gpus
= A GPU does many small calculations at once and has fast memory. That is what language models
need.

what: cuda | a cuda graph | cuda graphs
= CUDA is how programs use NVIDIA GPUs. A CUDA graph records many small launches and replays them as
one, which saves time in every decoding step.

what: triton | a triton kernel | the triton language
= Triton is a language for writing GPU kernels in Python. It lets one write blocks of work instead
of single threads.

what: a kernel | a gpu kernel | kernels
= A kernel is a small program that runs on the GPU, for example one that computes attention over
paged blocks.

what: rope | rotary embeddings | rotary position embeddings
= Rotary embeddings turn queries and keys by an angle that depends on the position. So attention
sees how far apart two tokens are.

what: a mixture of experts | moe | mixture of experts
= A mixture of experts has many feed-forward parts, and a router picks a few for each token. So it
knows more without computing more.

what: lora | a lora adapter | lora adapters
= LoRA adds two small matrices to a big one, so a model can learn a new task with few new weights.
One server can use many adapters.

what: structured output | json mode | constrained decoding
? how do i force a model to write json
= Structured output masks every token that would break a given form, such as a JSON schema. So the
answer always fits.

what: a system prompt | the system prompt | system message
= A system prompt is a message at the start that tells the model how to behave. It is the same for
many requests, so prefix caching helps.

what: a chat template | the chat template | chat templates
= A chat template turns the messages of a conversation into one text, with a mark for each role,
the way the model saw it in training.

are: hallucinations | a hallucination
? do language models make things up
= A hallucination is a wrong answer that sounds right. Models predict likely text, and likely is
not the same as true.
"""
