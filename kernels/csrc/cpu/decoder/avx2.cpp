#include "ops_impl.h"

namespace trirun {

#if defined(__AVX2__)
namespace {
constexpr DecoderOps kTable = TRIRUN_DECODER_TABLE;
}
const DecoderOps* const kDecoderAvx2 = &kTable;
#else
const DecoderOps* const kDecoderAvx2 = nullptr;
#endif

}  // namespace trirun
