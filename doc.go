// Package agentlab defines the domain types of AgentLab (sandboxes, jobs,
// profiles, events, artifacts), their states, and the rules that make a value
// valid.
//
// It does no I/O, reads no clock and imports only the standard library. Every
// other package may import it.
package agentlab
