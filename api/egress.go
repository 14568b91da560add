package api

import "time"

// EgressRecord tells of one decision on what a guest wanted from the network,
// or of several equal ones that came close together.
type EgressRecord struct {
	ID      int64     `json:"id" doc:"Strictly increasing"`
	Time    time.Time `json:"time" doc:"Of the first decision"`
	Last    time.Time `json:"last" doc:"Of the last decision"`
	VMID    int       `json:"vmid"`
	JobID   string    `json:"job_id,omitempty" doc:"The job that was at work"`
	Seq     int64     `json:"seq" doc:"Number in the sandbox's own log; 0 for the one record of rule audit.limit, which tells how many decisions are in no record"`
	Proto   string    `json:"proto" doc:"tcp, udp, icmp, dns, or ip-N"`
	Name    string    `json:"name,omitempty" doc:"What the guest named: a question to DNS, a TLS or HTTP name, or what the address was last resolved from; bytes that are no graphic ASCII character are written \\DDD"`
	Addr    string    `json:"addr,omitempty"`
	Port    int       `json:"port,omitempty"`
	Allow   bool      `json:"allow"`
	Rule    string    `json:"rule" doc:"What decided"`
	Error   string    `json:"error,omitempty" doc:"Why what was allowed could not be opened"`
	Count   int       `json:"count" doc:"Decisions that this record stands for"`
	Dropped int       `json:"dropped,omitempty" doc:"Decisions before this one that were too many to be recorded"`
}

// EgressSummary is what a job wanted from the network, in short.
type EgressSummary struct {
	Allowed int64          `json:"allowed" doc:"Decisions"`
	Denied  int64          `json:"denied"`
	Dropped int64          `json:"dropped,omitempty" doc:"Decisions of either kind that are in no record"`
	Targets []EgressTarget `json:"denied_targets,omitempty" doc:"What was refused, the most frequent first"`
	More    int            `json:"more_denied_targets,omitempty" doc:"Refused targets that are not listed"`
	Private []EgressTarget `json:"private_targets,omitempty" doc:"Private destinations, opened by the operator, that were used"`
}

// EgressTarget is one thing that was refused, or reached.
type EgressTarget struct {
	Proto string    `json:"proto"`
	Name  string    `json:"name,omitempty"`
	Addr  string    `json:"addr,omitempty"`
	Port  int       `json:"port,omitempty"`
	Rule  string    `json:"rule"`
	Count int64     `json:"count"`
	Last  time.Time `json:"last"`
}
