// Decode attention of csrc/cuda on the host, beside float64. Prints a line for each case that is wrong; the exit code
// says whether one is.
#include "fibers.h"

#include <random>

#include "cuda/decoder/attention_16bit.cuh"
#include "cuda/decoder/attention_grouped.cuh"

namespace {

using namespace trirun::decoder;
using trirun::ActivationLayout;

constexpr int PAGES_OF_SLOT = 12, POSITIONS = PAGES_OF_SLOT * PAGE;
const int LENGTHS[] = {0, 15, 16, 65, 63, 197, 700};
constexpr int ROWS = sizeof LENGTHS / sizeof *LENGTHS, IDLE = 3;

struct Case {
  int heads, kv_heads, head_dim, rotary_half, splits;
  bool limbs = false, norms = false, value_norms = false, sinks = false, interleaved = false;
  int window = 0;
  float softcap = 0.f;
  bool clusters = true;
};

const Case CASES[] = {
    {.heads = 8, .kv_heads = 2, .head_dim = 128, .rotary_half = 64, .splits = 5, .limbs = true, .norms = true},
    {.heads = 8, .kv_heads = 1, .head_dim = 128, .rotary_half = 64, .splits = 30, .limbs = true, .sinks = true},
    {.heads = 6, .kv_heads = 1, .head_dim = 256, .rotary_half = 64, .splits = 16, .limbs = true, .norms = true},
    {.heads = 6, .kv_heads = 2, .head_dim = 64, .rotary_half = 32, .splits = 3, .sinks = true, .window = 70},
    {.heads = 12,
     .kv_heads = 1,
     .head_dim = 128,
     .rotary_half = 32,
     .splits = 2,
     .limbs = true,
     .interleaved = true,
     .softcap = 20.f},
    {.heads = 16, .kv_heads = 2, .head_dim = 64, .rotary_half = 16, .splits = 4, .limbs = true},
    {.heads = 8, .kv_heads = 1, .head_dim = 80, .rotary_half = 40, .splits = 7, .limbs = true},
    {.heads = 3, .kv_heads = 1, .head_dim = 96, .rotary_half = 0, .splits = 9, .window = 33, .clusters = false},
    {.heads = 4, .kv_heads = 4, .head_dim = 128, .rotary_half = 64, .splits = 4, .limbs = true},
    {.heads = 4, .kv_heads = 2, .head_dim = 64, .rotary_half = 32, .splits = 1, .norms = true, .window = 40},
    {.heads = 16, .kv_heads = 2, .head_dim = 512, .rotary_half = 256, .splits = 6, .limbs = true, .norms = true},
    {.heads = 2, .kv_heads = 2, .head_dim = 264, .rotary_half = 132, .splits = 3, .norms = true, .clusters = false},
    {.heads = 2, .kv_heads = 2, .head_dim = 32, .rotary_half = 16, .splits = 2, .value_norms = true},
    {.heads = 4, .kv_heads = 2, .head_dim = 200, .rotary_half = 100, .splits = 2, .value_norms = true, .window = 90},
};

// Byte of an activation's k within 16 in the limbs: activations.cuh.
const int LIMB_BYTE[16] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};

const AttentionArgs* arguments;
AttentionKernel kernel;

template <bool BF16>
class Problem {
 public:
  Problem(const Case& c, unsigned seed, bool few) : c_(c), random_(seed), seed_(seed), few_(few) {
    const int pages = ROWS * PAGES_OF_SLOT + 3;
    q_ = drawn(ROWS * c.heads), k_ = drawn(ROWS * c.kv_heads), v_ = drawn(ROWS * c.kv_heads);
    keys_ = drawn(pages * c.kv_heads * PAGE), values_ = drawn(pages * c.kv_heads * PAGE);
    for (int i = 0; i < pages; i++) table_.push_back(i);
    for (int i = 0; i < ROWS; i++) slots_.push_back(i);
    std::shuffle(table_.begin(), table_.end(), random_);
    std::shuffle(slots_.begin(), slots_.end(), random_);
    slots_[IDLE] = -1;
    for (int i = 0; i < POSITIONS * std::max(1, c.rotary_half); i++) {
      const float angle = normal();
      cosines_.push_back(std::cos(angle)), sines_.push_back(std::sin(angle));
    }
    for (int i = 0; i < c.head_dim; i++) q_norm_.push_back(1 + 0.3f * normal()), k_norm_.push_back(1 + 0.3f * normal());
    for (int i = 0; i < c.head_dim; i++) v_norm_.push_back(1 + 0.3f * normal());
    for (int i = 0; i < c.heads; i++) sinks_.push_back(normal());
    // What no position has is NaN.
    for (int r = 0; r < ROWS; r++)
      for (int h = 0; slots_[r] >= 0 && h < c.kv_heads; h++)
        for (int p = LENGTHS[r]; p < POSITIONS; p++)
          for (int i = 0; i < c.head_dim; i++) keys_[at(r, h, p) + i] = values_[at(r, h, p) + i] = 0x7fff;
  }

  void run() {
    AttentionArgs a{};
    trirun_attention& t = a.t;
    y_.assign(q_.size(), 0x7fff);
    t.q = q_.data(), t.k = k_.data(), t.v = v_.data(), t.y = c_.limbs ? nullptr : y_.data();
    t.keys = keys_.data(), t.values = values_.data(), t.block_tables = table_.data(), t.slots = slots_.data();
    t.positions = LENGTHS, t.cosines = cosines_.data(), t.sines = sines_.data();
    t.q_norm = c_.norms ? q_norm_.data() : nullptr, t.k_norm = c_.norms ? k_norm_.data() : nullptr;
    t.v_norm = c_.value_norms || c_.norms ? v_norm_.data() : nullptr;
    t.sinks = c_.sinks ? sinks_.data() : nullptr;
    t.m = ROWS, t.heads = c_.heads, t.kv_heads = c_.kv_heads, t.head_dim = c_.head_dim, t.rotary_half = c_.rotary_half;
    t.ld_q = t.ld_y = c_.heads * c_.head_dim, t.ld_kv = c_.kv_heads * c_.head_dim, t.ld_blocks = PAGES_OF_SLOT;
    t.interleaved = c_.interleaved, t.window = c_.window, t.softcap = c_.softcap, t.eps = EPS, t.scale = scale();
    t.dtype = BF16 ? TRIRUN_BF16 : TRIRUN_F16;
    // As attention.cu has it.
    a.group = c_.heads / c_.kv_heads, a.chunks = (a.group + MAX_GROUP - 1) / MAX_GROUP;
    a.room = std::min(a.group, MAX_GROUP), a.teams = 1, a.cluster = c_.clusters ? std::min(c_.splits, MAX_CLUSTER) : 1;
    t.splits = (c_.splits + a.cluster - 1) / a.cluster * a.cluster;
    while (c_.limbs && (c_.head_dim << a.unit_log) % trirun::K_TILE) a.unit_log++;
    std::vector<float> partials(static_cast<size_t>(ROWS) * c_.heads * c_.splits * (c_.head_dim + 2));
    std::vector<unsigned> counters(ROWS * c_.kv_heads * a.chunks * MAX_GROUP);
    a.partials = partials.data(), a.counters = counters.data();
    unsigned rows = ROWS;
    if (c_.limbs) {
      buffer_.assign(ActivationLayout(ROWS, t.ld_q, TRIRUN_ACT16).bytes, 0xee);
      limbs_ = a.quantized = LimbRows(buffer_.data(), ROWS, t.ld_q, TRIRUN_ACT16);
      rows = limbs_.tokens;
    }
    int shared = 0;
    a.warps = ATTEND_WARPS;
    kernel = is_grouped(c_.head_dim, a.room) ? grouped_for_head<BF16>(c_.head_dim, few_, a.warps, shared)
                                             : for_head<BF16>(c_.head_dim, a.room, shared);
    arguments = &a;
    on_host::grid = dim3(t.splits, c_.kv_heads * a.chunks, rows);
    std::vector<uint3> clusters;
    for (unsigned z = 0; z < on_host::grid.z; z++)
      for (unsigned y = 0; y < on_host::grid.y; y++)
        for (unsigned x = 0; x < on_host::grid.x; x += a.cluster) clusters.push_back({x, y, z});
    std::shuffle(clusters.begin(), clusters.end(), random_);
    const on_host::Order order{(seed_ & 1) != 0, (seed_ & 2) != 0};
    for (uint3 first : clusters)
      on_host::run_cluster(first, a.cluster, a.warps * 32, order, [] { kernel(*arguments); });
    left_ = std::count_if(counters.begin(), counters.end(), [](unsigned count) { return count != 0; });
  }

  // Whether y, the cache and the counters are what they are to be.
  bool right() const {
    double worst = 0;
    bool appended = true;
    for (int r = 0; r < ROWS; r++)
      for (int g = 0; slots_[r] >= 0 && g < c_.kv_heads; g++) {
        const size_t from = (static_cast<size_t>(r) * c_.kv_heads + g) * c_.head_dim, to = at(r, g, LENGTHS[r]);
        const auto key = made(&k_[from], k_norm_, LENGTHS[r]), value = normed(&v_[from]);
        for (int i = 0; i < c_.head_dim; i++)
          appended &= std::abs(wide(keys_[to + i]) - key[i]) <= ROUNDING * std::abs(key[i]) + 1e-5 &&
                      std::abs(wide(values_[to + i]) - value[i]) <= ROUNDING * std::abs(value[i]);
        const int group = c_.heads / c_.kv_heads;
        for (int h = g * group; h < (g + 1) * group; h++) worst = std::max(worst, error(r, g, h));
      }
    const bool good = worst < (c_.limbs ? 2e-4 : ROUNDING) && appended && left_ == 0;
    if (!good)
      printf("%s, %d over %d heads of %d, %d splits%s, order %u: error %.2e, cache %s, %d counters left\n",
             BF16 ? "bf16" : "fp16", c_.heads, c_.kv_heads, c_.head_dim, c_.splits, few_ ? ", few" : "", seed_ & 3,
             worst, appended ? "right" : "wrong", left_);
    return good;
  }

 private:
  static constexpr float EPS = 1e-6f;
  static constexpr double ROUNDING = BF16 ? 4.1e-3 : 5.2e-4;

  static double wide(uint16_t v) { return widen_one<BF16>(v); }
  float normal() { return distribution_(random_); }
  float scale() const { return 1.f / std::sqrt(static_cast<float>(c_.head_dim)); }
  std::vector<uint16_t> drawn(int heads) {
    std::vector<uint16_t> values(static_cast<size_t>(heads) * c_.head_dim);
    for (uint16_t& v : values) v = narrow<BF16>(normal());
    return values;
  }
  size_t at(int row, int kv_head, int position) const {
    const int page = table_[slots_[row] * PAGES_OF_SLOT + position / PAGE];
    return cache_offset(page, c_.kv_heads, kv_head, position, c_.head_dim);
  }

  std::vector<double> made(const uint16_t* head, const std::vector<float>& norm, int position) const {
    std::vector<double> x(c_.head_dim);
    double squares = 0;
    for (int i = 0; i < c_.head_dim; i++) x[i] = wide(head[i]), squares += x[i] * x[i];
    for (int i = 0; c_.norms && i < c_.head_dim; i++) x[i] *= norm[i] / std::sqrt(squares / c_.head_dim + EPS);
    for (int i = 0; i < c_.rotary_half; i++) {
      double& a = x[c_.interleaved ? 2 * i : i];
      double& b = x[c_.interleaved ? 2 * i + 1 : i + c_.rotary_half];
      const double cosine = cosines_[position * c_.rotary_half + i], sine = sines_[position * c_.rotary_half + i];
      const double turned = a * cosine - b * sine;
      b = b * cosine + a * sine, a = turned;
    }
    return x;
  }

  std::vector<double> normed(const uint16_t* value) const {
    std::vector<double> x(c_.head_dim);
    double squares = 0;
    for (int i = 0; i < c_.head_dim; i++) x[i] = wide(value[i]), squares += x[i] * x[i];
    const bool wanted = c_.value_norms || c_.norms;
    for (int i = 0; wanted && i < c_.head_dim; i++) x[i] *= v_norm_[i] / std::sqrt(squares / c_.head_dim + EPS);
    return x;
  }

  double result(int row, int column) const {
    if (!c_.limbs) return wide(y_[static_cast<size_t>(row) * c_.heads * c_.head_dim + column]);
    const uint8_t* block = limbs_.limbs + (static_cast<int64_t>(column / 16) * limbs_.columns + row * 2) * 16;
    const int byte = LIMB_BYTE[column % 16];
    return limbs_.scales[column / trirun::K_TILE * limbs_.tokens + row].x *
           (256. * static_cast<int8_t>(block[byte]) + static_cast<int8_t>(block[16 + byte]));
  }

  // ‖found - expected‖ / ‖expected‖ of one head.
  double error(int row, int kv_head, int head) const {
    const int last = LENGTHS[row], begin = c_.window > 0 ? std::max(0, last + 1 - c_.window) : 0;
    const auto query = made(&q_[(static_cast<size_t>(row) * c_.heads + head) * c_.head_dim], q_norm_, last);
    std::vector<double> scores;
    for (int p = begin; p <= last; p++) {
      double score = 0;
      for (int i = 0; i < c_.head_dim; i++) score += query[i] * wide(keys_[at(row, kv_head, p) + i]);
      score *= scale();
      scores.push_back(c_.softcap != 0.f ? c_.softcap * std::tanh(score / c_.softcap) : score);
    }
    double sum = c_.sinks ? std::exp(sinks_[head]) : 0;
    std::vector<double> expected(c_.head_dim);
    for (int p = begin; p <= last; p++) {
      const double weight = std::exp(scores[p - begin]);
      sum += weight;
      for (int i = 0; i < c_.head_dim; i++) expected[i] += weight * wide(values_[at(row, kv_head, p) + i]);
    }
    double difference = 0, norm = 0;
    for (int i = 0; i < c_.head_dim; i++) {
      const double wanted = expected[i] / sum;
      difference += std::pow(result(row, head * c_.head_dim + i) - wanted, 2), norm += wanted * wanted;
    }
    const double found = std::sqrt(difference / norm);
    return std::isnan(found) ? INFINITY : found;
  }

  Case c_;
  std::mt19937 random_;
  std::normal_distribution<float> distribution_;
  unsigned seed_;
  bool few_;
  std::vector<uint16_t> q_, k_, v_, keys_, values_, y_;
  std::vector<int> table_, slots_;
  std::vector<float> cosines_, sines_, q_norm_, k_norm_, v_norm_, sinks_;
  std::vector<uint8_t> buffer_;
  LimbRows limbs_;
  int left_ = 0;
};

template <bool BF16>
bool holds(const Case& c, unsigned seed, bool few) {
  Problem<BF16> problem(c, seed, few);
  problem.run();
  return problem.right();
}

}  // namespace

int main() {
  // The two types, the four orders, and both numbers of warps in turn, where there are two.
  unsigned seed = 0, wrong = 0;
  for (const Case& c : CASES)
    for (bool few : {false, true}) {
      if (few && (!c.clusters || c.heads < 3 * c.kv_heads || c.head_dim > 128)) continue;
      wrong += !(seed & 1 ? holds<true>(c, seed / 2, few) : holds<false>(c, seed / 2, few));
      seed++;
    }
  return wrong > 0;
}
