// The numbers of one answer while it streams: tokens, speed, tau, acceptance by depth.

export const depthOf = (strategy) => (strategy?.includes(":") ? parseInt(strategy.split(":")[1], 10) : 0);

export class Run {
  constructor() {
    this.first = null; // when the first text came, and the last; in ms
    this.last = null;
    this.tokens = 0;
    this.firstTokens = 0; // how many came with the first text: before the clock starts
    this.rounds = []; // {accepted, depth} of each step of the model after the prompt was read
    this.strategy = null;
    this.stats = null; // the server's numbers, once it has sent them
    this.finish = null;
    this.pieces = []; // {at, pieces, accepted}: enough to play the run again
  }

  take(event, now) {
    if (event.pieces.length) {
      if (this.first === null) {
        this.first = now;
        this.firstTokens = event.pieces.length;
      }
      this.last = now;
      this.tokens += event.pieces.length;
    }
    if (event.accepted !== null) this.rounds.push({ accepted: event.accepted, depth: depthOf(event.strategy) });
    if (event.pieces.length || event.accepted !== null) {
      this.pieces.push({ at: now - (this.first ?? now), pieces: event.pieces, accepted: event.accepted });
    }
    if (event.strategy) this.strategy = event.strategy;
    if (event.finish) this.finish = event.finish;
    if (event.usage) this.tokens = event.usage.completion_tokens;
    if (event.stats) this.stats = event.stats;
  }

  // Tokens a second after the first text: by the server's clock, once it has told.
  get speed() {
    return this.stats?.tok_s ?? this.pace;
  }

  // The same by this page's clock; null before there is a second text.
  get pace() {
    return this.seconds > 0 ? (this.tokens - this.firstTokens) / this.seconds : null;
  }

  // Tokens committed a step: 1 + accepted / rounds.
  get tau() {
    if (this.stats) return this.stats.tau;
    const sum = this.rounds.reduce((total, round) => total + round.accepted, 0);
    return this.rounds.length ? 1 + sum / this.rounds.length : null;
  }

  // Of each depth: the share of the rounds drafting so deep whose guesses were right down to there.
  get acceptance() {
    if (this.stats?.acceptance_by_depth) return this.stats.acceptance_by_depth;
    const deepest = Math.max(0, ...this.rounds.map((round) => round.depth));
    return Array.from({ length: deepest }, (_, i) => {
      const drafted = this.rounds.filter((round) => round.depth > i);
      return drafted.filter((round) => round.accepted > i).length / drafted.length;
    });
  }

  get seconds() {
    return this.first === null ? 0 : (this.last - this.first) / 1000;
  }
}
