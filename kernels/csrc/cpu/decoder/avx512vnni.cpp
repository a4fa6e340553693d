#include "ops_impl.h"

namespace trirun {

#if defined(__AVX512F__)
namespace {
constexpr DecoderOps kTable = TRIRUN_DECODER_TABLE;
}
const DecoderOps* const kDecoderAvx512 = &kTable;
#else
const DecoderOps* const kDecoderAvx512 = nullptr;
#endif

}  // namespace trirun
