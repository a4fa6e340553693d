/* The table of ops.h with the functions as this source's flags compile them. Only portable.cpp, avx2.cpp and
 * avx512vnni.cpp include it. */
#ifndef TRIRUN_CPU_DECODER_OPS_TABLE_H
#define TRIRUN_CPU_DECODER_OPS_TABLE_H

#include "attention.h"
#include "delta.h"
#include "head.h"
#include "rows.h"
#include "sample.h"

namespace trirun {
namespace {

constexpr DecoderOps kDecoderOps = {
    load_row, rms_norm,     layer_norm, add,         add_scaled, scale,        soften,     gate,     clipped_swiglu,
    rotate,   rotate_pairs, store_key,  store_value, attend,     attend_row,   delta_rule, convolve, unit,
    dense,    head_limbs,   head_bytes, head_int8,   largest,    block_maxima, threshold,  filter,   masses};

}  // namespace
}  // namespace trirun
#endif
