// Package agentlab is the domain of AgentLab: the things it is about
// (sandboxes, jobs, profiles, events, artifacts), the states they may be in,
// and the rules that make a value of them valid.
//
// It has no I/O, no clock and no dependency outside the standard library, so
// that every other package may import it and it imports none of them.
package agentlab
