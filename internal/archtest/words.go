package archtest

// Phrase is a phrase that user-facing text must not contain, with its
// replacement.
type Phrase struct {
	Text    string // lower case; matched as whole words, in any case, also across a line break
	Instead string // what to write
}

// Phrases is the word list of TestPlainEnglish and TestPlainComments. A phrase
// belongs here only if technical English has a plainer form for almost every
// use of it, because the tests have no exception for a single sentence.
var Phrases = []Phrase{
	// "tell": say what the program does.
	{"tells whether", `"reports whether", or name the result: "shows the state"`},
	{"tells how", `"describes how", "shows how"`},
	{"tells of", `"reports", "describes"`},
	{"tell of", `"report", "describe"`},
	{"is told", `"receives", "gets", "is informed"`},
	{"are told", `"receive", "get"`},
	{"not told", `"not informed", "not updated"`},
	{"be told", `"be informed", "be configured"`},

	{"tells", `"reports", "returns", "shows"`},
	{"told", `"reported", "informed"; or use the active voice: "gets"`},
	{"says why", `"with the reason", "states the reason"`},

	// Pronouns: name the subject.
	{"nobody", `name the subject ("no user", "no process"), or use the passive: "is not read"`},
	{"somebody", `name the subject: "a user", "another process", "another sandbox"`},
	{"somebody else", `"another user", "another process", "another sandbox"`},
	{"whoever", `"anyone who", "a user who", "the client that"`},
	{"of ours", `"AgentLab's"`},
	{"not ours", `"not created by AgentLab"`},
	{"of theirs", `name the owner`},
	{"a stranger", `"an unknown client", "an unauthenticated client"`},
	{"of a sandbox's own", `"separate for each sandbox"`},

	// Obligation.
	{"is to be", `"must be", "will be"`},
	{"are to be", `"must be", "will be"`},

	// Metaphors: use the standard term.
	{"lets go of", `"releases", "closes", "deletes"`},
	{"gives away", `"reveals", "discloses"`},
	{"makes way", `"is evicted", "is removed"`},
	{"takes back", `"undoes", "removes"`},
	{"what is kept", `name it: "stored files", "the retention period"`},
	{"what becomes of", `"the decision for", "the result of"`},
	{"stands on", `"uses", "depends on"`},
	{"stands for", `"means", "represents"`},
	{"stands alone", `"must be set together with"`},
	{"where it stood", `"resume", "continue"`},
	{"bears", `"has", "contains"`},
	{"bear our mark", `"have AgentLab's mark"`},
	{"goes with it", `"is deleted with it"`},
	{"wanted from the network", `"egress decisions", "network requests"`},
	{"a slip of", `"usage error"`},
	{"the house", `"the project", "the module"`},
	{"put right", `"fix", "correct"`},
	{"mend", `"fix"`},
	{"spoken to", `"connected to", "accessed"`},
	{"stands still", `"is paused"`},
	{"left alone", `"not changed", "ignored"`},
	{"cut short", `"interrupted"; for data "truncated"`},
	{"goes on", `"continues"`},
	{"under way", `"in progress", "running"`},
	{"put back", `"restore"`},
	{"taken out", `"removed", "disabled"`},
	{"lets in", `"allows"`},
	{"looked through", `"searched", "listed"`},
	{"what was known of", `name it: "the handle", "the state"`},
	{"of no use", `"unused", "not supported"`},
	{"has no use for", `"does not support", "does not need"`},

	// Dated forms.
	{"anew", `"again", "new"`},
	{"any more", `"no longer" before the verb; for a missing record "not found"`},
	{"valid no more", `"expired"`},
	{"by hand", `"manually"`},
	{"meanwhile", `"in the meantime"`},
	{"not understood", `"invalid"`},
	{"broke off", `"was truncated", "failed"`},
	{"makes no sense", `"is invalid"`},
	{"vanished", `"not found", "was deleted"`},
	{"the caller left", `"the request was cancelled"`},
	{"exclude each other", `"cannot be used together"`},
	{"the reason is above", `"see the error above"`},
	{"for ever", `"permanently", "without limit"`},
	{"be had", `"be read", "is not available"`},
	{"not a cursor", `"invalid cursor"`},
	{"of the page before", `"of the previous page"`},
	{"as things are", `"currently", "in the current state"`},
}
