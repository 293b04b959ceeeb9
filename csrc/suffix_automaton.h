// Suffix automaton of texts that may grow: finds where the longest end of what was read stands in them.
//
// Built online (Blumer, Blumer, Haussler, Ehrenfeucht, Chen, Seiferas, TCS 40, 1985), over several texts by starting
// each at the root. At most 2 states and 3 edges per token. engine/suffix_automaton.py is its Python twin.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace palimpsest {

using Token = std::int32_t;

// The token at `position` of `text` follows `length` tokens that are also the last ones read; length 0: nothing does.
struct SuffixMatch {
    int length, text, position;
};

class SuffixAutomaton {
  public:
    SuffixAutomaton() : states_{State{0, kNone, 0, 0, {}}} {}

    // A new, empty text; -> its number, from 0.
    int add();

    // Let a text grow. What was read before is forgotten: it may stand in the text now.
    void extend(int text, const Token* ids, std::size_t count);

    // Read on.
    void advance(const Token* ids, std::size_t count);

    // The longest end of what was read that a text goes on after; the place that was entered first unless its text ends
    // there.
    SuffixMatch match() const;

    std::size_t states() const { return states_.size(); }

  private:
    static constexpr int kNone = -1;
    using Edge = std::pair<Token, int>;  // token, state

    // Strings that end at the same places. length: of the longest; link: the state of its longest suffix elsewhere.
    // text, end: the first place where they end.
    struct State {
        int length, link, text, end;
        std::vector<Edge> edges;  // by rising token
    };
    struct Text {
        int last, size;  // the state of the whole text, its tokens
    };

    int next(int state, Token token) const;
    void connect(int state, Token token, int target);
    int grow(int last, Token token, int text, int end);
    int split(int state, Token token, int target);

    std::vector<State> states_;
    std::vector<Text> texts_;
    // The longest end of what was read that stands in a text: a string of state_, of length read_.
    int state_ = 0, read_ = 0;
};

}  // namespace palimpsest
