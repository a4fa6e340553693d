/* The C interface of trirun's kernels: raw pointers, integers, a stream; integer return codes.
 *
 * Two libraries implement it: libtrirun_cpu.so (csrc/cpu) and libtrirun_cuda.so (csrc/cuda). Neither knows
 * Python or torch. The caller checks shapes, dtypes, devices and contiguity; these functions re-check what
 * would corrupt memory. n = out_features, k = in_features, m = rows of x. The weight layout (tile64) is
 * defined in kernels/README.md and in trirun_kernels/weights/layout.py.
 */
#ifndef TRIRUN_H
#define TRIRUN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The libraries are built with -fvisibility=hidden: what this header declares is all they export. */
#pragma GCC visibility push(default)

/* Raised whenever what is declared below changes or grows; the loader refuses a library of another version. */
#define TRIRUN_ABI_VERSION 26

/* Return codes. 0 is success; positive values of the CUDA library are cudaError_t. */
enum {
  TRIRUN_OK = 0,
  TRIRUN_BAD_SHAPE = -1,     /* a size is negative, unpadded, or does not fit the group size */
  TRIRUN_BAD_POINTER = -2,   /* null or misaligned */
  TRIRUN_UNSUPPORTED = -3,   /* dtype, group size or activation width this library has no kernel for */
  TRIRUN_NO_WORKSPACE = -4,  /* the workspace is smaller than the function asks for */
  TRIRUN_OLD_BUILD = -5      /* CUDA: built for older devices alone than the current one */
};

/* Element types of x, y and bias. */
enum { TRIRUN_F32 = 0, TRIRUN_F16 = 1, TRIRUN_BF16 = 2 };

/* One packed weight, w[n][k] = scale * (code - zero), code in 0..3. */
typedef struct {
  const uint32_t* words;   /* [n/64][k/32][32 lanes][4], 16-byte aligned */
  const uint16_t* scales;  /* fp16 [k/group_size][n] in n tile order; one row when group_size is -1 */
  const uint16_t* zeros;   /* fp16, shaped as scales: one real zero point per group; NULL when `zero` holds for all */
  int64_t n;               /* padded to a multiple of 64 */
  int64_t k;               /* padded to a multiple of 128 */
  int32_t group_size;      /* -1, 32, 64 or 128 */
  float zero;              /* zero point of the grid; ignored when zeros is not NULL */
} trirun_int2;

/* Activation width: 16 takes two int8 limbs per value, scaled per row and 128 columns (matches a float reference); 8
 * takes one limb, scaled per row by amax/127 (exact for models trained with 8-bit activations). */
enum { TRIRUN_ACT8 = 8, TRIRUN_ACT16 = 16 };

/* ---- libtrirun_cpu.so ---------------------------------------------------------------------------------- */

int trirun_cpu_abi_version(void);

/* Name of the instruction set the dispatcher chose: "amx", "avx512vnni", "avx2", "portable". All of them give
 * bitwise the same results. */
const char* trirun_cpu_isa(void);

/* Chooses an instruction set by name, NULL or "" for the best this machine has, for every later call of the process;
 * TRIRUN_UNSUPPORTED where the machine lacks it. The environment variable TRIRUN_CPU_ISA sets the first choice. */
int trirun_cpu_set_isa(const char* name);

/* Activations quantized once and read by every linear on them. Rows are independent of each other: a row has the
 * same limbs alone and in a batch. A row that holds a NaN or an infinity has a NaN scale and makes NaN outputs. */
typedef struct {
  int8_t* limbs; /* [m][act_bits/8][k]: every 32 columns in tile64's order (t, c, b); 16 bits: row high, row low */
  float* scales; /* act_bits 8: [m], 16: [m][k/128]; x = scale * limb, or scale * (256 high + low) */
  int32_t* sums; /* [m][k/32]: the sum of the 32 limbs (256 high + low) of each block, for the zero point */
  int64_t m;
  int64_t k; /* padded to a multiple of 128, as the weight's; the padding is zero */
  int32_t act_bits;
} trirun_act;

/* Bytes of memory (64-byte aligned) that trirun_cpu_act_init divides among a trirun_act's arrays; 0 for bad sizes. */
size_t trirun_cpu_act_bytes(int64_t m, int64_t k, int act_bits);
int trirun_cpu_act_init(trirun_act* act, void* memory, size_t bytes, int64_t m, int64_t k, int act_bits);

/* Quantizes x[m][k], k the true one, into an initialised act. act_bits 8: limb = round(x / (amax/127)), half to even,
 * in fp32 with amax at least 1e-5: the int8 activations of BitNet b1.58. act_bits 16: per 128 columns,
 * 256 high + low = round(x * 32639/amax), with high and low in -128..127. */
int trirun_cpu_quantize(trirun_act* act, const void* x, int dtype, int64_t k, int64_t ldx, int threads);

/* y[m][n] = act . w^T + bias; dtype is that of bias and y. */
int trirun_cpu_int2_gemm_act(const trirun_int2* w, int64_t n, const trirun_act* act, int dtype, const void* bias,
                             void* y, int64_t ldy, int threads);

/* y[m][n] = x[m][k] . w^T + bias, with `threads` threads of the library's own pool: trirun_cpu_quantize and
 * trirun_cpu_int2_gemm_act in one call, in memory of the library. k here is the true k of x (at most w->k), n the
 * true n of y and bias (at most w->n); ldx and ldy are row strides in elements. */
int trirun_cpu_int2_gemm(const trirun_int2* w, int64_t n, int64_t k, const void* x, int dtype, int64_t m, int64_t ldx,
                         const void* bias, void* y, int64_t ldy, int act_bits, int threads);

/* Reads `bytes` of memory (64-byte aligned) once, as fast as this machine can, and adds its 64-bit words, up to the
 * last few hundred bytes, into *sum. Timing it over more memory than the caches hold gives the bandwidth decoding lives
 * on. */
int trirun_cpu_read(const void* memory, int64_t bytes, int threads, uint64_t* sum);

/* ---- libtrirun_cpu.so: the native decoder ----------------------------------------------------------------- */

/* Decoders of transformer layers, a whole forward step in one call. What the fields below cannot say it does not run:
 * the caller refuses such models. All activations are fp32; linears read them quantized to act_bits. */

/* act of act(gate) * up. TRIRUN_GELU_TANH: the approximation of Hendrycks & Gimpel 2016 by tanh. TRIRUN_CLIPPED_SWIGLU
 * (gpt-oss): gate at most, and up within, a limit, then (up + 1) * gate * sigmoid(1.702 * gate). */
enum { TRIRUN_SILU = 0, TRIRUN_RELU2 = 1, TRIRUN_GELU_TANH = 2, TRIRUN_CLIPPED_SWIGLU = 3 };

/* Of the output gate of attention alone. */
enum { TRIRUN_SIGMOID = 8 };

/* Norms of the residual stream: x / sqrt(mean(x^2) + eps) * weight; with the mean taken away first, a layer norm. */
enum { TRIRUN_RMS_NORM = 0, TRIRUN_LAYER_NORM = 1 };

/* head_dtype of a head that trirun_cpu_head_int8 made; embedding_dtype and head_dtype of a packed weight. */
enum { TRIRUN_HEAD_INT8 = 16, TRIRUN_PACKED = 17 };

/* y = x . w^T + bias, packed. */
typedef struct {
  trirun_int2 weight;
  const float* bias; /* [n] or NULL */
  int64_t n; /* true sizes, at most the weight's padded ones */
  int64_t k;
} trirun_linear;

/* Gated DeltaNet in place of attention (csrc/cpu/decoder/delta.h). Head dimensions are multiples of 16; value head h
 * has key head h / (value_heads / key_heads). Columns are of the outputs of qkv with those of z behind them: q of key
 * head h begins at h * key_stride, k at k_column + h * key_stride, v and z of all its value heads at v_column and
 * z_column + h * value_stride and z_stride. */
typedef struct {
  trirun_linear qkv, z; /* z.n 0: qkv has it too */
  const void* gates; /* [b of all value heads, a of all value heads][hidden] of gates_dtype */
  const float* conv; /* [taps][channels], the newest token's last; channels: q, k, v of all heads in this order */
  const float *decay_rate, *decay_bias, *norm; /* [value_heads]: -e^A; [value_heads]; [value_dim] */
  float* state; /* [slots][value_heads][key_dim][value_dim], of any content, as the ring */
  float* ring; /* [slots][taps][channels]: inputs of the convolution, of position p at p % taps */
  int64_t key_heads, value_heads, key_dim, value_dim, taps;
  int64_t key_stride, k_column, v_column, value_stride, z_column, z_stride;
  int32_t gates_dtype;
  int32_t reserved;
} trirun_delta_layer;

/* What scores the logits of a router. */
enum { TRIRUN_ROUTE_SOFTMAX = 0, TRIRUN_ROUTE_SIGMOID = 1 };

/* A mixture of experts: sum over the row's top_k experts of weight * down(act(gate x) * up x). */
typedef struct {
  const trirun_linear* gate; /* [experts] each, of one size; all three of one group size */
  const trirun_linear* up;
  const trirun_linear* down;
  const void* router; /* [experts (+ 1)][hidden], the last row the shared expert's gate where there is one */
  const float* bias; /* [experts], of the router's logits, or NULL */
  const float* correction; /* [experts] or NULL: added to scores for the choice, not for the weights */
  const float* expert_scale; /* [experts] or NULL: of an expert's weight, after all else */
  int64_t experts, top_k, size; /* at most 512, 32; size: features between */
  int32_t router_dtype;
  int32_t score; /* TRIRUN_ROUTE_... */
  int32_t groups, top_groups; /* experts outside of the best groups are not chosen; 1 and 1: no groups */
  int32_t normalize; /* weights of a row sum to `scale` */
  int32_t shared_gate; /* 1: the shared expert's output is multiplied by the sigmoid of the router's last logit */
  int32_t activation;
  float scale; /* of the weights */
  float limit; /* of TRIRUN_CLIPPED_SWIGLU */
  int32_t reserved;
} trirun_mixture;

/* An input of every layer's own, made of a row's token and its embedding x (Gemma 4): layer i has the elements
 * [i * size, (i + 1) * size) of scale * (norm(projection_scale * projection . x) + table_scale * table[token]), where
 * the norm is over these `size`. */
typedef struct {
  const void* table; /* [vocab][layers * size] of table_dtype */
  const void* projection; /* [layers * size][hidden]; TRIRUN_PACKED: a trirun_linear without a bias */
  const float* norm; /* [size] */
  int64_t size; /* a multiple of 16 */
  float table_scale, projection_scale, scale;
  int32_t table_dtype, projection_dtype;
  int32_t reserved;
} trirun_layer_inputs;

/* One layer; what may be NULL is left out. Its parts add to the residual stream x:
 *   x += post_norm(o . sub_norm(attention(q, k, v of norm(x))))
 *   x += post_norm(down . sub_norm(act(gate of norm(x)) * up of norm(x)))
 *   x += input_norm(input_out . (act(input_gate . x) * the layer's own input))
 * With `parallel` the first two read the x before the layer. In the end x *= output_scale. */
typedef struct {
  trirun_linear q, k, v; /* of attention. k.n and v.n 0: keys and values are an earlier layer's, whose `keys`, `values`,
                            kv_heads, head_dim and context these are too (Gemma 4) */
  trirun_linear q_gate; /* the attention's outputs are multiplied by its sigmoid (Qwen3-Next); n 0: there is none */
  const trirun_delta_layer* delta; /* NULL: attention */
  trirun_linear o, gate, up, down; /* gate.n 0: there is none, and the feed-forward part is act(up) */
  trirun_linear input_gate, input_out; /* [size][hidden], [hidden][size] of trirun_layer_inputs; n 0: there is none */
  const float* attention_norm; /* [hidden] or NULL */
  const float* mlp_norm;
  const float* q_norm; /* before the rotation, or NULL: [head_dim], every head by itself (Qwen3); row_norms: all */
  const float* k_norm; /* together, [heads * head_dim] and [kv_heads * head_dim] (OLMo 2) */
  const float* v_norm; /* [head_dim], of every value head by itself, or NULL (Gemma 4) */
  const float* attention_sub_norm; /* [heads * head_dim] before o, or NULL (BitNet) */
  const float* mlp_sub_norm; /* [ffn] before down, or NULL (BitNet) */
  const float* attention_post_norm; /* [hidden] of what is added, or NULL (Gemma 2) */
  const float* mlp_post_norm;
  const float* shared_norm; /* [hidden] of x, where a mixture's shared expert does not read what the others do */
  const float* shared_post_norm; /* [hidden] of its output, and of the others' sum, before the two are added */
  const float* experts_post_norm;
  const float* attention_norm_bias; /* [hidden], of layer norms, or NULL */
  const float* mlp_norm_bias;
  const float* sinks; /* [heads]: logits that take part in the softmax and weigh no value, or NULL (gpt-oss) */
  const float* input_norm; /* [hidden] or NULL */
  const float* output_scale; /* [1] or NULL (Gemma 4) */
  const float* cosines; /* [context][rotary_half], any attention factor included; NULL: no rotation */
  const float* sines;
  void* keys; /* trirun_cpu_decoder_cache_bytes each, of any content: [slots][kv_heads][context] */
  void* values;
  const trirun_mixture* mixture; /* or NULL. With one, gate, up and down are its shared expert; ffn 0: there is none */
  int64_t heads, kv_heads, head_dim, ffn;
  int64_t rotary_half; /* pairs that rotate, head_dim / 2 unless rotation is partial */
  int64_t window; /* positions that a token sees, its own among them; 0: all */
  int64_t context; /* positions of the layer's cache, as trirun_cpu_decoder_context rounds them: the decoder's, or
                      fewer, at least `window` and the rows of a step; then position p lies where p % context would */
  float attention_scale;
  float softcap; /* c of c * tanh(score / c); 0: none */
  int32_t activation; /* TRIRUN_SILU, ... */
  int32_t interleaved; /* 1: pairs (2i, 2i + 1) rotate; 0: (i, i + rotary_half) */
  int32_t row_norms;
  int32_t parallel;
} trirun_layer;

typedef struct {
  int64_t layers, hidden, vocab;
  int64_t slots; /* sequences the cache holds */
  int64_t context; /* positions of a slot, as trirun_cpu_decoder_context rounds them */
  float norm_eps;
  float embedding_scale; /* of an embedding's row */
  float residual_scale; /* of what a part adds to x */
  float logit_softcap; /* as softcap */
  int32_t norm; /* TRIRUN_RMS_NORM or TRIRUN_LAYER_NORM, of norms over hidden elements */
  int32_t act_bits; /* of every linear but the head */
  int32_t kv_dtype; /* TRIRUN_F16 or TRIRUN_F32 */
  int32_t embedding_dtype;
  const void* embedding; /* [vocab][hidden]; TRIRUN_PACKED: a trirun_linear without a bias */
  int32_t head_dtype;
  int32_t reserved;
  const void* head; /* [vocab][hidden]; the embedding where they are tied. TRIRUN_HEAD_INT8: bytes
                            [vocab][trirun_cpu_head_stride(hidden)], weight = scale * (byte - 128). TRIRUN_PACKED: a
                            trirun_linear without a bias, multiplied by 16-bit activations */
  const float* head_scales; /* [vocab] for TRIRUN_HEAD_INT8 */
  const trirun_layer* layer;
  const float* final_norm;
  const float* final_norm_bias; /* or NULL */
  const trirun_layer_inputs* inputs; /* or NULL */
} trirun_decoder;

/* `count` consecutive tokens of one slot, the first at `position`; the slot's earlier positions are in the cache. */
typedef struct {
  int64_t slot, position, count;
} trirun_segment;

/* Bytes of a row of an 8-bit head of k columns. */
int64_t trirun_cpu_head_stride(int64_t k);

/* Makes rows of an 8-bit head, and their scales, from x[n][k] of dtype, k a multiple of 16. */
int trirun_cpu_head_int8(const void* x, int dtype, int64_t n, int64_t k, uint8_t* rows, float* scales, int threads);

/* The least context of a decoder that holds so many positions: keys lie in blocks. */
int64_t trirun_cpu_decoder_context(int64_t positions);

/* Bytes of `keys`, and of `values`, of a layer; 0 for one that has none of its own, and for sizes that the decoder
 * cannot run. Only sizes are read. */
size_t trirun_cpu_decoder_cache_bytes(const trirun_decoder* d, int64_t layer);

/* Bytes of workspace (64-byte aligned, contents arbitrary) of a step of that many rows; 0 for bad sizes. */
size_t trirun_cpu_decoder_workspace(const trirun_decoder* d, int64_t rows);

/* Runs tokens[rows], the segments' one after another, and appends them to the cache; slots ascend strictly from segment
 * to segment. logits[i][vocab] are those of row logit_rows[i], or of row i where that is NULL. A row's logits are the
 * same, bit for bit, whatever the batch, the split of its sequence into steps and the number of threads. */
int trirun_cpu_decoder_step(const trirun_decoder* d, const trirun_segment* segments, int64_t segment_count,
                            const int64_t* tokens, int64_t rows, const int64_t* logit_rows, int64_t logit_count,
                            float* logits, void* workspace, size_t workspace_bytes, int threads);

/* The same, but for what it gives: states[i][hidden] of those rows after the last norm, what the head would read. */
int trirun_cpu_decoder_states(const trirun_decoder* d, const trirun_segment* segments, int64_t segment_count,
                              const int64_t* tokens, int64_t rows, const int64_t* state_rows, int64_t state_count,
                              float* states, void* workspace, size_t workspace_bytes, int threads);

/* How a token is drawn: temperature, top-k, top-p of what that leaves, min-p, then the inverse of the cumulative
 * distribution over ascending ids at number `index` of a stream of SplitMix64. */
typedef struct {
  double temperature; /* 0: not at all, the largest logit wins */
  double top_p, min_p; /* 1 and 0: all; top_p above 0 */
  int64_t top_k; /* 0: all; ties with the last one stay */
  uint64_t stream;
  uint64_t index; /* of the first token that is drawn; raised by one for each that follows */
} trirun_draw;

/* Draws a token from logits[vocab]; -1 where none is a number. temperature above 0. */
int trirun_cpu_draw(const float* logits, int64_t vocab, const trirun_draw* draw, int64_t* token);

/* Decoding, `steps` steps in one call: segments have a count of 1, tokens[segment_count] are the first step's, and
 * those of every later step are chosen from the logits of the step before and go to out[step][segment_count]: by
 * draws[segment_count], or the largest (of equals the first) where that is NULL or its temperature 0; -1 where no logit
 * is a number. Ends early after a step that brought such a -1 or one of `stop`; *done steps were made.
 * logits[segment_count][vocab] are those of the last one. As in decoder_step, results do not depend on the batch, the
 * number of threads, or how many steps a call makes. */
int trirun_cpu_decoder_generate(const trirun_decoder* d, const trirun_segment* segments, int64_t segment_count,
                                const int64_t* tokens, int64_t steps, const trirun_draw* draws, const int64_t* stop,
                                int64_t stop_count, int64_t* out, int64_t* done, float* logits, void* workspace,
                                size_t workspace_bytes, int threads);

/* What decoding cannot be faster than: the packed products and the head of `steps` steps of one row on inputs quantized
 * beforehand, and nothing between them. apart 1: one call after another, as trirun_cpu_int2_gemm_act makes them; 0: in
 * one parallel region, whose threads never wait for each other. Outputs are dropped; the cache is neither read nor
 * written. Not of mixtures of experts. */
int trirun_cpu_decoder_products(const trirun_decoder* d, int64_t steps, int apart, int threads);

/* ---- libtrirun_cuda.so --------------------------------------------------------------------------------- */

int trirun_cuda_abi_version(void);

/* Text for any return code of this library, cudaError_t included. */
const char* trirun_cuda_error(int code);

/* Kernels of packed products. */
enum {
  TRIRUN_KERNEL_STREAM = 1, /* few rows: mma.sync u8.s8, k split over the CTAs of a cluster: sm_90 and newer */
  TRIRUN_KERNEL_STREAM_SM80 = 2, /* the same kernel, k split through the workspace: sm_80 and newer */
  TRIRUN_KERNEL_GROUPS = 3, /* up to 64 rows, any group size: wgmma u8.s8, the weights in registers: sm_90a */
  TRIRUN_KERNEL_PREFILL_WGMMA = 4, /* many rows: wgmma fp16/bf16 with the weights in registers: sm_90a */
  TRIRUN_KERNEL_PREFILL_SM80 = 5, /* many rows: mma.sync fp16/bf16: sm_80 and newer */
  TRIRUN_KERNEL_PREFILL_W2A8 = 6, /* many rows, 8-bit activations: wgmma u8.s8: sm_90a */
  TRIRUN_KERNEL_DEQUANTIZE = 7, /* writes the dense weight [n][k] to y in its dtype; x is not read */
  TRIRUN_KERNEL_SPANS = 8 /* up to 64 rows, one scale of w per output channel or 128 k, sums over spans of
                                      k: sm_90a */
};

/* How a product is computed: the kernel and its tile, chosen by trirun_kernels/plan/select.py. A field that a kernel
 * does not use is 0. Every value is checked; one without a compiled instance returns TRIRUN_UNSUPPORTED. */
typedef struct {
  int32_t kernel; /* TRIRUN_KERNEL_... */
  int32_t tile_m; /* rows of x of one CTA (prefill), or tensor-core columns that hold them (spans: 16, 32 or 64;
                           0: 32 rows) */
  int32_t tile_n; /* out_features of one CTA (spans: 192, or 0 for 256) */
  int32_t warps; /* of one CTA */
  int32_t warp_split; /* split-k: warps of a CTA that share an n tile */
  int32_t cta_split; /* split-k: CTAs that share an n tile: a cluster on sm_90, through the workspace elsewhere;
                           spans: 2 for clusters of two CTAs of a tile */
  int32_t stages; /* of the shared-memory ring */
  int32_t ctas; /* grid of a persistent kernel; 0: one CTA per tile. Of the groups and spans kernels (at least
                           1) and, where it is not 0, of the Hopper prefill kernels: stream-k, the k tiles of all tiles
                           divided equally among so many */
  int32_t fused; /* 1: the kernel quantizes x itself; 0: a kernel of its own does before */
  int32_t early; /* groups, spans: stages of weights asked for before x is there; 0: as many as the ring has */
  int32_t x_first; /* of x, asked for before the other weights; at most `early` */
} trirun_cuda_plan;

/* Numbers that callers need too, for sizes and for the choice of plans. */
typedef struct {
  int32_t n_tile; /* out_features of a tile of the layout; n is padded to a multiple */
  int32_t k_tile; /* k of a pipeline stage of the decode kernels, and of one scale of x */
  int32_t k_pad; /* what k is padded to a multiple of */
  int32_t decode_rows; /* rows of x of one product on quantized activations, at most */
  int32_t exact_sum_k; /* k over which one CTA can add up 8-bit activations in int32 */
  int32_t counter_bytes; /* at the start of a workspace, kept zero */
  int32_t span_k_tiles; /* of TRIRUN_KERNEL_SPANS: k tiles that share a scale of x */
  int32_t tile_rows; /* of TRIRUN_KERNEL_GROUPS and _SPANS: out_features of one CTA */
  int32_t low_tile_rows; /* of TRIRUN_KERNEL_SPANS, the lower tile */
  int32_t w2a8_max_k; /* k of TRIRUN_KERNEL_PREFILL_W2A8, at most */
  int32_t head_int8_rows; /* rows of x of one trirun_cuda_head_int8, at most */
  int32_t head_16bit_rows, head_16bit_columns, head_12bit_columns; /* of x of one such head of few rows, at most */
} trirun_cuda_limits;

void trirun_cuda_get_limits(trirun_cuda_limits* limits);

/* Dynamic shared memory in bytes of one CTA under a plan, as the launch asks for it, or -1: no kernel runs the plan (no
 * instance, sizes that it does not divide, or more than the 227 KiB of the devices with the most; what a smaller device
 * allows is for the caller to compare). Needs no device. n, k: padded sizes. has_zeros: one zero point per group, or
 * (for prefill) one for all that is not a multiple of 1/4. quantized: x comes from trirun_cuda_quantize. A fused plan
 * is taken to be given x that its kernel can read. arch: compute capability, 10 * major + minor. */
int64_t trirun_cuda_plan_shared_bytes(int64_t n, int64_t k, int64_t m, int32_t group_size, int32_t has_zeros,
                                      int32_t act_bits, int32_t dtype, int32_t quantized, int32_t arch,
                                      const trirun_cuda_plan* plan);

/* Whether a plan counts arrivals in the first bytes of the workspace, which must be zero before its first run: 1 or 0.
 * Kernels that quantize x themselves clear them, or need no zeros. quantized: as above. */
int32_t trirun_cuda_plan_needs_zeros(const trirun_cuda_plan* plan, int32_t quantized);

/* The id of the CUDA graph capture under way on this stream, which no other capture of the process has; 0 if none. */
uint64_t trirun_cuda_capture_id(void* stream);

/* Bytes of device memory trirun_cuda_int2_gemm needs beside its arguments for m rows of x under a plan. */
size_t trirun_cuda_int2_workspace(const trirun_int2* w, int64_t m, int dtype, int act_bits,
                                  const trirun_cuda_plan* plan);

/* As trirun_cpu_int2_gemm, on the current device and the given cudaStream_t. Nothing is allocated; the workspace
 * (256-byte aligned; its first 64 KiB zero before the first product that counts arrivals there, see
 * trirun_cuda_plan_needs_zeros, and kept zero by all) belongs to the stream.
 * The kernels read words, scales, zeros and bias before the stream's previous kernel has ended (programmatic
 * dependent launch): these must not be written by that very kernel. x and the workspace may be. */
int trirun_cuda_int2_gemm(const trirun_int2* w, int64_t n, int64_t k, const void* x, int dtype, int64_t m, int64_t ldx,
                          const void* bias, void* y, int64_t ldy, int act_bits, const trirun_cuda_plan* plan,
                          void* workspace, size_t workspace_bytes, void* stream);

/* The two halves of a product of few rows, for an engine that quantizes x once for several weights: bytes of the
 * quantized form of m rows (layout: csrc/cuda/common/activations.cuh), the quantization, and the product on it. */
size_t trirun_cuda_activation_bytes(int64_t m, int64_t k_pad, int act_bits);
int trirun_cuda_quantize(const void* x, int dtype, int64_t m, int64_t k, int64_t ldx, int64_t k_pad, int act_bits,
                         void* activations, size_t activation_bytes, void* stream);
int trirun_cuda_int2_gemm_quantized(const trirun_int2* w, int64_t n, const void* activations, int64_t m,
                                    const void* bias, void* y, int dtype, int64_t ldy, int act_bits,
                                    const trirun_cuda_plan* plan, void* workspace, size_t workspace_bytes,
                                    void* stream);

/* Reads `bytes`, a multiple of 16, and adds their checksum to *sink: the floor under any kernel that reads them. */
int trirun_cuda_read_probe(const void* data, size_t bytes, void* sink, void* stream);

/* ---- libtrirun_cuda.so: fp16 accumulation ---------------------------------------------------------------- */

/* Kernels of trirun_cuda_f16acc_gemm. */
enum {
  TRIRUN_F16ACC_MMA = 1, /* mma.sync with fp16 sums, tiles of 128 x 128: sm_80 and newer */
  TRIRUN_F16ACC_WGMMA = 2 /* wgmma with fp16 sums, tiles of 128 x 128 and 128 x 256; y and bias on 16
                              bytes, ldy a multiple of 8, and a row's last 16 bytes are written whole: sm_90a */
};

enum { TRIRUN_F16ACC_A = 1, TRIRUN_F16ACC_B = 2 };

/* How such a product is computed, chosen by trirun_kernels/f16acc/cuda.py. */
typedef struct {
  int32_t kernel; /* TRIRUN_F16ACC_... */
  int32_t tile_n; /* columns of y of one CTA */
  int32_t chunk; /* columns of k summed in fp16, a multiple of 64; sums of chunks are added in fp32 */
  int32_t parts; /* CTAs that share a tile along k and add up through the workspace */
  int32_t along_rows; /* TRIRUN_F16ACC_A, _B: the operand lies in memory as [k][m] or [k][n]; WGMMA: neither, B, both */
} trirun_f16acc_plan;

/* Bytes of device memory (16-byte aligned, contents arbitrary) that the product needs under a plan. */
size_t trirun_cuda_f16acc_workspace(int64_t m, int64_t n, const trirun_f16acc_plan* plan);

/* y[m][n] = a[m][k] . b[n][k]^T + bias[n], all fp16, on the current device and the given cudaStream_t; a and b on 16
 * bytes, lda and ldb, from one row in memory to the next, multiples of 8; bias may be NULL. fp16 sums that leave their
 * range are computed again in fp32. */
int trirun_cuda_f16acc_gemm(const void* a, int64_t lda, const void* b, int64_t ldb, const void* bias, void* y,
                            int64_t ldy, int64_t m, int64_t n, int64_t k, const trirun_f16acc_plan* plan,
                            void* workspace, size_t workspace_bytes, void* stream);

/* ---- libtrirun_cuda.so: the native decoder ----------------------------------------------------------------- */

/* What lies between the matrix products of a decoder step, on the current device and the given cudaStream_t: nothing is
 * allocated, everything can be captured in a graph. dtype is F16 or BF16, that of x, y, keys and values; the residual
 * stream is float32. Kernels overlap (programmatic dependent launch): each waits for the previous kernel before it
 * touches what that one wrote, but reads weights, norms, block tables, slots, positions and the cached keys and values
 * of earlier positions ahead of that. trirun_cuda_sample and trirun_cuda_attention_append let nothing overlap them. */

/* y = norm(sum of a row's experts' outputs times their weights, in order of rank) + weight · norm(the shared one's). */
typedef struct {
  const void* x; /* [sorted rows][ldx] of dtype, on 16 bytes as all rows here */
  const int32_t* places; /* [m][top_k], and weights, as trirun_cuda_route left them */
  const float* weights;
  const void* shared; /* [m][ld_shared] or NULL */
  const float* shared_weights; /* [m] or NULL: 1 */
  const float *norm, *shared_norm; /* [n] of RMS norms, n at most 8192 then, or NULL: none */
  void* y; /* [m][ldy] */
  int64_t m, n, ldx, ld_shared, ldy; /* multiples of 8, but for m */
  int32_t top_k, dtype;
  float eps; /* of the norms */
} trirun_combine;

/* Where a row comes from. */
enum {
  TRIRUN_ROWS_RESIDUAL = 0, /* residual = output_scale * (residual + scale * x), or of `mixed`; x may be NULL */
  TRIRUN_ROWS_EMBED = 1, /* residual = scale * x[token], or of the token's row of `packed` */
  TRIRUN_ROWS_GATE = 2, /* act(x) * up, or act(x) where that is NULL */
  TRIRUN_ROWS_PLAIN = 3, /* x */
  TRIRUN_ROWS_POST = 4 /* the same of rms_norm(x), of the weight post_norm */
};

/* Rows from a source, through a norm if there is one, to 16-bit values, to quantized activations, or to both. */
typedef struct {
  const void* x; /* [m][ldx]; TRIRUN_ROWS_EMBED: [vocab][ldx], or NULL where `packed` is given */
  const void* up; /* [m][ldx], for TRIRUN_ROWS_GATE */
  float* residual; /* [m][n], for RESIDUAL, EMBED and POST */
  const float* norm; /* [n] or NULL */
  const float* norm_bias; /* [n], of a layer norm, or NULL */
  const float* post_norm; /* [n], for TRIRUN_ROWS_POST */
  void* y; /* [m][ldy] or NULL */
  void* activations; /* as trirun_cuda_quantize makes of y in float32, or NULL; m at most 128 then */
  size_t activation_bytes;
  const int32_t* tokens; /* [m], for TRIRUN_ROWS_EMBED; a negative one is latest[slots[row]] */
  const int32_t* slots;
  const int32_t* latest;
  int64_t m, n, ldx, ldy, vocab; /* n a multiple of 16 */
  float eps;
  float scale; /* of what goes to the residual stream */
  int32_t source, dtype, activation, act_bits; /* activation: TRIRUN_SILU, ... */
  int32_t centered; /* 1: a layer norm, which takes the mean away first; 0: an RMS norm */
  float output_scale; /* RESIDUAL and POST: of the residual stream behind the sum */
  const trirun_int2* packed; /* for TRIRUN_ROWS_EMBED: the packed embedding, in host memory; or NULL */
  const trirun_combine* mixed; /* RESIDUAL, n to 4096: instead of x the y of this without norms, unrounded; or NULL */
} trirun_rows;

int trirun_cuda_rows(const trirun_rows* rows, void* stream);

/* y[m][n] = scales[n] * (x[m][k] . (rows[n][k] - 128)), x and y of dtype, sums in fp32. x and rows on 16 bytes, k and
 * ldx multiples of 8, stride (bytes of a row) of 16, at least k; m at most trirun_cuda_limits' head_int8_rows. */
int trirun_cuda_head_int8(const void* x, int dtype, int64_t m, int64_t k, int64_t ldx, const uint8_t* rows,
                          const float* scales, int64_t n, int64_t stride, void* y, int64_t ldy, void* stream);

/* y[m][n] = w[n][k] . x[m][k], all of dtype, sums in fp32; from sm_90 on. x and w on 16 bytes, y on 4; n and ldx in
 * multiples of 8, k of 32, ldy of 2; m at most trirun_cuda_limits' head_16bit_rows, k head_16bit_columns. */
int trirun_cuda_head_16bit(const void* x, int dtype, int64_t m, int64_t k, int64_t ldx, const void* w, int64_t n,
                           void* y, int64_t ldy, void* stream);
/* The same of w in bfloat16, in 12 bits each without loss (weights/twelve_bits.py); k in multiples of 64, at least 512.
 * counter: zero before the first call, and kept zero. */
int trirun_cuda_head_12bit(const void* x, int dtype, int64_t m, int64_t k, int64_t ldx, const void* blocks,
                           const uint32_t* records, uint32_t* counter, int64_t n, void* y, int64_t ldy, void* stream);

/* Heads of m rows over a paged cache of one layer, [pages][kv_heads][64][head_dim]; position p of a slot is in page
 * block_tables[slot][p / 64]. A row whose slot is negative is skipped. The cache is of dtype, or, where scales are
 * given, int8 [pages][kv_heads][64][head_dim rounded up to 16] with one scale per token and head, its largest
 * magnitude / 127 rounded up, and code = round(x * (1 / scale)); keys, and queries for them, are mixed by an orthogonal
 * Hadamard matrix first, in blocks of the largest power of two that divides head_dim. */
typedef struct {
  const void* q; /* [m][ld_q]: heads * head_dim */
  const void* k; /* [m][ld_kv]: kv_heads * head_dim; k and v NULL: the cache has those of all rows already */
  const void* v;
  void* y; /* [m][ld_y]: heads * head_dim; or NULL */
  void* activations; /* instead: y quantized to 16 bits, as trirun_cuda_quantize does; of decoding alone, where
                               the heads of a key head (eight of them, if more) fill k tiles of 128 columns */
  size_t activation_bytes;
  void* keys;
  void* values;
  void* scales; /* fp16 [pages][kv_heads][64][2], of keys and of values; or NULL */
  const int32_t* block_tables; /* [slots][ld_blocks] */
  const int32_t* slots; /* [m] */
  const int32_t* positions; /* [m], of the row's token */
  const float* q_norm; /* [head_dim] or NULL */
  const float* k_norm; /* NULL without k, likewise v_norm */
  const float* v_norm; /* [head_dim] or NULL */
  const float* cosines; /* [positions][rotary_half]; NULL where rotary_half is 0 */
  const float* sines;
  const float* sinks; /* [heads]: logits that take part in the softmax and weigh no value; or NULL */
  int64_t m, heads, kv_heads, ld_q, ld_kv, ld_y, ld_blocks;
  int32_t head_dim; /* a multiple of 8, at most 512, of an int8 cache 256 */
  int32_t rotary_half;
  int32_t splits; /* CTAs that share a row's keys */
  int32_t dtype;
  int32_t interleaved; /* 1: pairs (2i, 2i + 1) rotate; 0: (i, i + rotary_half) */
  int32_t window; /* positions that a row sees, its own among them; 0: all */
  float eps;
  float scale; /* of q . k */
  float softcap; /* c of c * tanh(score / c); 0: none */
  int32_t reserved;
} trirun_attention;

/* Bytes of workspace (256-byte aligned, zero before its first use, left fit for the next) of a decode call. */
size_t trirun_cuda_attention_workspace(const trirun_attention* attention);

/* Norms and rotates q and k, norms v, appends k and v to the cache, and attends each row to its slot's positions up to
 * its own. Rows are of different slots. */
int trirun_cuda_attention_decode(const trirun_attention* attention, void* workspace, size_t workspace_bytes,
                                 void* stream);

/* The first half of that for rows of prompts: y is the rotated q (which may be q itself; mixed for an int8 cache), k
 * and v go to the cache. rotated_keys: NULL, or [m][ld_kv], which may be k itself: the keys as a cache of dtype has
 * them. */
int trirun_cuda_attention_append(const trirun_attention* attention, void* rotated_keys, void* stream);

/* Positions of some slots, one slot after another, as values of dtype; keys of an int8 cache stay mixed. */
typedef struct {
  const void* keys;
  const void* values;
  const void* scales; /* NULL: the cache is of dtype */
  const int32_t* block_tables; /* [slots][ld_blocks] */
  const int32_t* slots; /* [count] */
  const int32_t* starts; /* [count + 1]: slots[i] goes to positions starts[i] to starts[i + 1] of the output */
  const int32_t* pages; /* [count]: which of slots[i]'s pages is the first, or NULL: its first */
  void* keys_out; /* [starts[count]][kv_heads][head_dim] */
  void* values_out;
  int64_t count, longest, kv_heads, ld_blocks; /* longest: most positions of one slot */
  int32_t head_dim, dtype;
} trirun_gather;

int trirun_cuda_attention_gather(const trirun_gather* gather, void* stream);

/* Gated DeltaNet layers (csrc/cuda/delta/delta.cuh has the formulas): rows of m tokens on the recurrent states of their
 * slots, from the outputs of the input projections to the input of the output projection. A row whose slot is negative
 * is skipped. A slot at position 0 has no past, whatever its state holds. Head dimensions are multiples of 16, at most
 * 128; value head h has key head h / (value_heads / key_heads). */
typedef struct {
  const void* x; /* [m][ld_x] of dtype: q of key head h begins at h * key_stride, k at k_column + h * key_stride, v of
                    all its value heads at v_column + h * value_stride */
  const void* z; /* [m][ld_z]: of the value heads of key head h at h * z_stride */
  const void* hidden; /* decode: [m][ld_hidden], the input of the layer, 16-byte aligned, and gate_weight [b of all
                         value heads, a of all value heads][hidden_size], both of dtype */
  const void* gate_weight;
  const void* gates; /* prompts: [m][ld_gates] of dtype: hidden . gate_weight^T */
  const float* conv; /* [taps][channels], the newest token's last; channels: q, k, v of all heads in this order */
  const float *decay_rate, *decay_bias, *norm; /* [value_heads]: -e^A; [value_heads]; [value_dim] */
  float* state; /* [slots][value_heads][key_dim][value_dim] */
  void* ring; /* [slots][taps][channels] of dtype: inputs of the convolution, of position p at p % taps */
  void* y; /* [m][ld_y] of dtype; NULL where activations are wanted */
  void* activations; /* decode, value_dim of 128: y quantized to 16 bits, as trirun_cuda_quantize does */
  size_t activation_bytes;
  float* mixed; /* prompts: working memory, [m][channels + 2 * value_heads], 16-byte aligned */
  const int32_t* slots; /* [m] */
  const int32_t* positions; /* [m] */
  const int32_t* starts; /* prompts: [segments + 1], rows of the segments: consecutive tokens of one slot each */
  int64_t m, segments, ld_x, ld_z, ld_hidden, ld_gates, ld_y, hidden_size;
  int32_t key_heads, value_heads, key_dim, value_dim, taps; /* taps at most 4 */
  int32_t key_stride, k_column, v_column, value_stride, z_stride;
  int32_t dtype;
  float eps; /* of the norm */
} trirun_delta;

/* Rows are of different slots. */
int trirun_cuda_delta_decode(const trirun_delta* delta, void* stream);

/* Rows of prompts in segments, in chunks that multiply matrices (Yang et al. 2024, "Parallelizing Linear Transformers
 * with the Delta Rule over Sequence Length", the WY form). */
int trirun_cuda_delta_prompt(const trirun_delta* delta, void* stream);

/* A weight as trirun_int2 describes it, of sizes that follow from a step's: true ones that are padded ones. */
typedef struct {
  const uint32_t* words;
  const uint16_t *scales, *zeros;
} trirun_cuda_step_weight;

/* One layer of a step in one kernel, of which every CTA keeps all; gate_up is gate's rows, then up's. NULL: none. */
typedef struct {
  trirun_cuda_step_weight qkv, o, gate_up, down;
  float grid_zeros[4]; /* of these */
  const void *qkv_bias, *o_bias, *gate_up_bias, *down_bias; /* of dtype */
  const float *attention_norm, *mlp_norm; /* [hidden] */
  const float* attention_sub_norm; /* [heads * head_dim], of the input of o */
  const float* mlp_sub_norm; /* [ffn], of the input of down */
  const float *q_norm, *k_norm; /* [head_dim] */
  void *keys, *values, *scales; /* as of trirun_attention: of dtype, or int8 and scales */
} trirun_cuda_step_layer;

/* One decode step of 1, 2, 4 or 8 rows in one kernel, on sm_90: from tokens to the input of the head. Rows of a slot
 * follow each other; a negative one keeps none. one_text: all are of one, but for some at the end that are of none. */
typedef struct {
  const trirun_cuda_step_layer* layers; /* [layer_count], in device memory */
  const void* embedding; /* [vocab][hidden] of dtype; NULL: packed, which is in host memory */
  const trirun_int2* packed;
  void* y; /* [m][hidden] of dtype, after the final norm; NaN where the kernel gave up */
  const float* final_norm;
  const int32_t *tokens, *slots, *positions; /* [m]; a negative token is latest[slots[row]] */
  const int32_t *latest, *block_tables; /* [slots]; [slots][ld_blocks] */
  const float *cosines, *sines; /* [positions][rotary_half] */
  const int32_t* plan; /* [4][ctas / cluster + 1], in host memory: of qkv, o, gate_up, down (as o), the first unit of 64
                          outputs (or pairs) of every cluster, and the end; none has more than an equal share needs */
  void* messages; /* 256-byte aligned, of this structure's sizes alone, zero before the first step. The second 32-bit
                     word is not 0 once CTAs have waited for each other in vain. */
  size_t message_bytes; /* at least trirun_cuda_step_messages */
  int64_t m, layer_count, hidden, ffn, heads, kv_heads, ld_blocks, vocab; /* m * kv_heads to 128, of one_text 256 */
  int32_t head_dim, rotary_half, interleaved, activation, dtype, act_bits, one_text;
  int32_t group_size, real_zeros; /* of all weights: real_zeros 1 where they have a zero point per group */
  int32_t ctas, cluster; /* at most one for each multiprocessor, in clusters of 2, 4 or 8, no more than k tiles */
  int32_t in_flight; /* chunks of 8 KiB that a CTA may have on their way */
  int32_t int8_cache, attention_sub_norm; /* not 0: keys and values are int8; layers have such a norm */
  float eps, scale, embedding_scale; /* of all norms; of q . k; of the embedding's rows */
} trirun_cuda_step;

/* Bytes of messages; 0 for sizes that the kernel does not take. Needs no device. */
size_t trirun_cuda_step_messages(const trirun_cuda_step* step);
/* How many CTAs the current device holds at once, in clusters of step->cluster; 0 as above, or where it has no room. */
int trirun_cuda_step_ctas(const trirun_cuda_step* step);
/* Fails where not all of its CTAs can be resident at once. */
int trirun_cuda_decoder_step(const trirun_cuda_step* step, void* stream);

/* How a slot's tokens are chosen. */
typedef struct {
  float temperature; /* 0: the likeliest token */
  float top_p; /* 1: all */
  float min_p; /* 0: all */
  float presence, frequency; /* 0: none */
  float repetition; /* 1: none */
  int32_t top_k; /* 0: all */
  int32_t bias_count;
  uint64_t seed; /* of SplitMix64 */
  uint32_t drawn; /* tokens drawn so far; raised by every draw */
  int32_t wants_logprobs;
  int32_t masked; /* not 0: tokens outside this slot's mask are not chosen */
  int32_t reserved;
} trirun_sampler;

/* The next token of m rows. Rows are of different slots; one whose slot is negative is skipped. */
typedef struct {
  const void* logits; /* [m][ld] of dtype, any */
  const int32_t* slots; /* [m] */
  const int32_t* wanted; /* [m], 0: do not sample this row; or NULL */
  trirun_sampler* samplers; /* [slots], 8-byte aligned */
  int32_t* counts; /* [slots][vocab] of the generated text, bit 31: in the prompt; every draw raises one; or NULL */
  const int32_t* bias_tokens; /* [slots][bias_capacity] */
  const float* bias_values;
  const uint32_t* masks; /* [slots][ceil(vocab/32)]: bit i % 32 of word i / 32 allows token i; or NULL */
  float* work; /* [m][vocab] */
  int32_t* sampled; /* [m], -1 where not wanted, or where no allowed logit is a finite number */
  float* logprobs; /* [m] of the unmodified logits, where the slot wants them; or NULL */
  int32_t* latest; /* [slots]: becomes the sampled token, or 0 where there is none */
  int32_t* positions; /* [m] or NULL: raised by one */
  int32_t* tokens; /* [m] or NULL: becomes -1 */
  int64_t m, vocab, ld, bias_capacity;
  int32_t dtype;
  int32_t reserved;
} trirun_sample;

int trirun_cuda_sample(const trirun_sample* sample, void* stream);

/* ---- libtrirun_cuda.so: mixtures of experts --------------------------------------------------------------- */

/* Which experts every row goes to, and the order in which the experts' products take the rows. A pair is a row and one
 * of its experts, row * top_k + rank; pairs sorted by expert, and by number within one, are the sorted rows. Nothing
 * returns to the host. */
typedef struct {
  const void* x; /* [m][ldx] of dtype, for the router; or NULL: logits are given. m * top_k at most 1024 then */
  const void* router; /* [experts (+ 1)][k] of dtype, the last row the shared expert's gate where there is one */
  float* logits; /* [m][ld]: of all experts, and of the shared expert's gate behind them */
  const float* bias; /* [experts], of the logits, or NULL */
  const float* correction; /* [experts] or NULL: added to scores for the choice, not for the weights */
  const float* expert_scale; /* [experts], factors of the weights in the end, or NULL */
  const int32_t* slots; /* [m] or NULL: a row with a negative slot goes to no expert */
  float* weights; /* [m][top_k] */
  float* shared_weights; /* [m] or NULL: sigmoid of the shared expert's gate */
  int32_t* ids; /* [m][top_k], in descending order of the choice; -1: none */
  int32_t* places; /* [m][top_k]: sorted row of the pair, or -1 */
  int32_t* order; /* [m * top_k]: pair of a sorted row */
  int32_t* tiles; /* [trirun_cuda_expert_tiles][4]: expert, first sorted row, rows, 0; expert -1 beyond the last */
  int32_t* ends; /* [experts] or NULL: where the sorted rows of an expert end */
  uint32_t* counter; /* zero before the first call with x, and kept zero */
  int64_t m, k, ldx, ld;
  int32_t experts, top_k, tile_rows; /* at most 512, 32; sorted rows of a tile */
  int32_t score; /* TRIRUN_ROUTE_... */
  int32_t groups, top_groups; /* experts outside of the best groups are not chosen; 1 and 1: no groups */
  int32_t normalize, dtype; /* normalize: weights of a row sum to `scale`, before `expert_scale` */
  float scale; /* of the weights */
  const trirun_rows* rows; /* what makes x, its y, first, in host memory; or NULL: x is there */
} trirun_route;

/* Tiles of m rows, at most. */
int64_t trirun_cuda_expert_tiles(int64_t m, int64_t experts, int64_t top_k, int64_t tile_rows);

int trirun_cuda_route(const trirun_route* route, void* stream);

/* Products of the sorted rows with their experts. With `order`, rows = 1 and no `activations`, x may be read before the
 * stream's previous kernel ends; without `order`, tiles and weights may: that kernel must not write them. It is
 * trirun_cuda_route or trirun_cuda_experts, or one that lets no other begin early; trirun_cuda_rows reads places of one
 * `mixed` row so. */
typedef struct {
  trirun_int2 w; /* of the first expert; words, scales and zeros of the others follow it */
  const float* bias; /* [experts][w.n] or NULL */
  const void* x; /* [rows][ldx] of dtype */
  const void* activations; /* `rows` rows of x as trirun_cuda_rows quantizes them, with `order`; or NULL */
  const int32_t* order; /* as trirun_cuda_route left it: sorted row i reads row order[i] / top_k of x. NULL: row i */
  const int32_t* tiles;
  void* y; /* [sorted rows][ldy] of dtype */
  int64_t n, k; /* true sizes: of a row of y, and of x */
  int64_t ldx, ldy;
  int64_t tile_bound; /* of trirun_cuda_expert_tiles */
  int32_t top_k, tile_rows;
  int32_t gated; /* 1: w is gate | up, each of w.n / 2 rows, and y = act(gate) * up */
  int32_t activation, act_bits, dtype;
  float limit; /* of TRIRUN_CLIPPED_SWIGLU */
  int32_t rows; /* of x that `order` names; 0: any */
} trirun_experts;

/* Tiles of 1, 2, 4 or 8 rows, or 16 of 8-bit activations; for many rows 64 or 128, of 16-bit activations that are not
 * gated, with x and ldx on 16 bytes. */
int trirun_cuda_experts(const trirun_experts* experts, void* stream);

int trirun_cuda_combine(const trirun_combine* combined, void* stream);

/* y[experts][n][w.k], float16 or bfloat16: rows first to first + n of every expert's weight. w is the first one's, as
 * in trirun_experts; first and n are multiples of 64. */
int trirun_cuda_dequantize_experts(const trirun_int2* w, int64_t experts, int64_t first, int64_t n, int dtype, void* y,
                                   void* stream);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
