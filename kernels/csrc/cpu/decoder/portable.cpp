#include "ops_impl.h"

namespace trirun {

namespace {
constexpr DecoderOps kTable = TRIRUN_DECODER_TABLE;
}
const DecoderOps* const kDecoderPortable = &kTable;

}  // namespace trirun
