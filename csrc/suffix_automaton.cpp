#include "suffix_automaton.h"

#include <algorithm>

namespace palimpsest {

int SuffixAutomaton::add() {
    texts_.push_back({0, 0});
    return int(texts_.size()) - 1;
}

void SuffixAutomaton::extend(int text, const Token* ids, std::size_t count) {
    Text& grown = texts_.at(text);
    for (std::size_t i = 0; i < count; i++) grown.last = grow(grown.last, ids[i], text, ++grown.size);
    state_ = read_ = 0;
}

void SuffixAutomaton::advance(const Token* ids, std::size_t count) {
    for (std::size_t i = 0; i < count; i++) {
        int target = next(state_, ids[i]);
        while (target == kNone && state_ != 0) {
            state_ = states_[state_].link;
            read_ = states_[state_].length;
            target = next(state_, ids[i]);
        }
        if (target == kNone) continue;
        state_ = target;
        read_++;
    }
}

SuffixMatch SuffixAutomaton::match() const {
    int length = read_;
    for (int at = state_; at != 0; at = states_[at].link) {
        const State& state = states_[at];
        length = std::min(length, state.length);
        if (state.end < texts_[state.text].size) return {length, state.text, state.end};
        if (!state.edges.empty()) {
            const State& longer = states_[state.edges.front().second];
            return {length, longer.text, longer.end - 1};
        }
    }
    return {0, kNone, kNone};
}

int SuffixAutomaton::next(int state, Token token) const {
    const auto& edges = states_[state].edges;
    auto found = std::lower_bound(edges.begin(), edges.end(), Edge{token, kNone});
    return found != edges.end() && found->first == token ? found->second : kNone;
}

void SuffixAutomaton::connect(int state, Token token, int target) {
    auto& edges = states_[state].edges;
    auto at = std::lower_bound(edges.begin(), edges.end(), Edge{token, kNone});
    if (at != edges.end() && at->first == token)
        at->second = target;
    else
        edges.insert(at, {token, target});
}

// The state of the string of `last` with `token` behind it, which ends at `end` of `text`.
int SuffixAutomaton::grow(int last, Token token, int text, int end) {
    int known = next(last, token);
    if (known != kNone) return split(last, token, known);
    int fresh = int(states_.size());
    states_.push_back({states_[last].length + 1, 0, text, end, {}});
    int state = last;
    for (; state != kNone && next(state, token) == kNone; state = states_[state].link) connect(state, token, fresh);
    if (state != kNone) {
        int link = split(state, token, next(state, token));
        states_[fresh].link = link;
    }
    return fresh;
}

// The state whose longest string is that of `state` with `token` behind it: `target`, or what is split off from it.
int SuffixAutomaton::split(int state, Token token, int target) {
    int length = states_[state].length + 1;
    if (states_[target].length == length) return target;
    int shorter = int(states_.size());
    State copy = states_[target];
    copy.length = length;
    states_.push_back(std::move(copy));
    states_[target].link = shorter;
    for (; state != kNone && next(state, token) == target; state = states_[state].link) connect(state, token, shorter);
    return shorter;
}

}  // namespace palimpsest
